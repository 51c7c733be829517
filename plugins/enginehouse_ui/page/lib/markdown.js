// Markdown of models as safe HTML. Model output is hostile: raw HTML and images become text, links show their target.
import { marked } from "../vendor/marked/marked.esm.js";
import { BlockReader } from "./blocks.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul", "div",
];
const MOST_CHARS = 200_000; // longer texts are shown as they are

const escaped = (text) =>
  text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

marked.use({
  gfm: true,
  renderer: {
    html: ({ raw, text }) => escaped(raw ?? text),
    image: ({ href, text }) => `<span class="as-text">[image: ${escaped(text || "without a text")}, ${escaped(href)}]</span>`,
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // below the page's own headings
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    link({ href, tokens }) {
      const text = this.parser.parseInline(tokens);
      if (!/^(https?:|mailto:)/i.test(href)) return `${text} <span class="as-text">(${escaped(href)})</span>`;
      const target = text === escaped(href) ? "" : ` <span class="as-text">(${escaped(href)})</span>`;
      return `<a href="${escaped(href)}" target="_blank" rel="noopener noreferrer nofollow">${text}</a>${target}`;
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    table(token) {
      const row = (cells, tag) =>
        `<tr>${cells.map((cell) => `<${tag}>${this.parser.parseInline(cell.tokens)}</${tag}>`).join("")}</tr>`;
      const body = token.rows.map((cells) => row(cells, "td")).join("");
      return `<div class="wide"><table><thead>${row(token.header, "th")}</thead><tbody>${body}</tbody></table></div>`;
    },
  },
});

function sanitized(html) {
  return globalThis.DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "target", "rel", "class", "start"],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
    ADD_URI_SAFE_ATTR: ["target", "rel", "class", "start"], // no addresses: the pattern is not for them
    ALLOW_DATA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

/** <md-view .text=${markdown}>: draws the blocks that changed since the last text, and in them the nodes that changed. */
class MarkdownView extends HTMLElement {
  #reader = new BlockReader();
  #drawn = []; // what each block was drawn from
  #items = new WeakMap(); // what the items of a list were drawn from, by the element around it
  #text = "";

  constructor() {
    super();
    this.addEventListener("click", ({ target }) => {
      const button = target.closest(".copy");
      if (button) copyText(button.nextElementSibling.textContent, button);
    });
  }

  set text(text) {
    if (text === this.#text) return;
    const isLonger = text.startsWith(this.#text);
    this.#text = text;
    if (text.length > MOST_CHARS) this.#drawPlain(text, isLonger);
    else this.#drawBlocks(text);
  }

  #drawPlain(text, isLonger) {
    this.#drawn = [];
    this.#reader = new BlockReader(); // it has read what is not shown any more
    const shown = this.querySelector(":scope > .plain")?.firstChild;
    if (shown && isLonger) {
      shown.appendData(text.slice(shown.length));
      return;
    }
    const plain = document.createElement("pre");
    plain.className = "plain";
    plain.textContent = text;
    this.replaceChildren(plain);
  }

  #drawBlocks(text) {
    if (!this.#drawn.length) this.replaceChildren();
    const { start, blocks, hasNewLinks } = this.#reader.read(text);
    for (const [offset, block] of blocks.entries()) {
      const index = start + offset;
      const source = `${block.type} ${block.raw}`;
      const mayHaveNewLink = hasNewLinks && block.type !== "code" && block.raw.includes("[");
      if (this.#drawn[index] === source && !mayHaveNewLink) continue;
      this.#drawn[index] = source;
      if (!this.children[index]) this.append(document.createElement("div"));
      const box = this.children[index];
      merge(box, block.type === "list" ? this.#drawnList(block, box, hasNewLinks) : drawn(block));
      if (block.type !== "list") this.#items.delete(box);
    }
    this.#drawn.length = start + blocks.length;
    while (this.children.length > this.#drawn.length) this.lastElementChild.remove();
  }

  /** A list; items that are as they were are copied from `box`, where it was drawn, since sanitising is what costs time. */
  #drawnList(block, box, hasNewLinks) {
    const before = this.#items.get(box) ?? [];
    const items = block.items.map((item) => `${item.loose} ${item.raw}`);
    this.#items.set(box, items);
    const shown = box.firstElementChild?.children ?? [];
    const isKept = items.map((source, index) => !hasNewLinks && index > 0 && source === before[index] && Boolean(shown[index]));
    const nodes = drawn({ ...block, items: block.items.filter((_, index) => !isKept[index]) });
    const list = nodes.firstElementChild;
    for (const [index, kept] of isKept.entries()) {
      if (!kept) continue;
      const next = list.children[index] ?? null;
      list.insertBefore(shown[index].cloneNode(true), next);
      list.insertBefore(document.createTextNode("\n"), next);
    }
    return nodes;
  }
}
customElements.define("md-view", MarkdownView);

/** A block as safe nodes. Scrolled parts can be reached by keyboard, code can be copied. */
function drawn(block) {
  const nodes = sanitized(marked.parser([block]));
  for (const table of nodes.querySelectorAll(".wide")) nameRegion(table, "Table");
  for (const pre of nodes.querySelectorAll("pre")) {
    const [, language] = /^language-(\S+)/.exec(pre.firstElementChild?.className) ?? [];
    nameRegion(pre, language ? `Code, ${language}` : "Code");
    const box = document.createElement("div");
    box.className = "code-block";
    pre.replaceWith(box);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet small copy";
    button.textContent = "Copy";
    box.append(button, pre);
  }
  return nodes;
}

function nameRegion(element, label) {
  element.tabIndex = 0;
  element.setAttribute("role", "region");
  element.setAttribute("aria-label", label);
}
/** Make the content of `old` that of `made`. Nodes that are the same stay: their selection, focus and scroll position, too. */
function merge(old, made) {
  const nodes = [...made.childNodes];
  for (const [index, node] of nodes.entries()) {
    const shown = old.childNodes[index];
    if (!shown) old.append(node);
    else if (shown.isEqualNode(node) || (shown.nodeName === "BUTTON" && node.nodeName === "BUTTON")) continue;
    else if (shown.nodeType === Node.TEXT_NODE && node.data?.startsWith(shown.data)) shown.appendData(node.data.slice(shown.length));
    else if (shown.cloneNode(false).isEqualNode(node.cloneNode(false))) merge(shown, node);
    else shown.replaceWith(node);
  }
  while (old.childNodes.length > nodes.length) old.lastChild.remove();
}

/** Copy as plain text, and say so on the button for a moment. */
export async function copyText(text, button) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = "Not allowed";
  }
  if (!button) return;
  button.dataset.text ??= button.textContent;
  button.textContent = said;
  setTimeout(() => (button.textContent = button.dataset.text), 1500);
}
