// Markdown of models as safe HTML. Model output is hostile: raw HTML and images become text, links show their target.
import { marked } from "../vendor/marked/marked.esm.js";

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
    RETURN_TRUSTED_TYPE: true,
  });
}

/** <md-view .text=${markdown}>: draws the blocks that changed since the last text. */
class MarkdownView extends HTMLElement {
  #raws = [];
  #targets = "{}";
  #text = "";

  set text(text) {
    if (text === this.#text) return;
    this.#text = text;
    if (text.length > MOST_CHARS) {
      this.#raws = [];
      const plain = document.createElement("pre");
      plain.className = "plain";
      plain.textContent = text;
      this.replaceChildren(plain);
      return;
    }
    const all = marked.lexer(text);
    const targets = JSON.stringify(all.links);
    if (targets !== this.#targets) this.#raws = []; // a definition may change any block
    this.#targets = targets;
    const blocks = all.filter((block) => block.type !== "space" && block.type !== "def");
    blocks.forEach((block, index) => {
      if (this.#raws[index] === block.raw) return;
      this.#raws[index] = block.raw;
      const drawn = document.createElement("div");
      drawn.innerHTML = sanitized(marked.parser([block]));
      if (block.type === "code") finishCode(drawn, block.lang);
      drawn.querySelectorAll(".wide").forEach((element) => {
        element.tabIndex = 0;
        element.setAttribute("role", "region");
        element.setAttribute("aria-label", "Table");
      });
      if (this.children[index]) this.children[index].replaceWith(drawn);
      else this.append(drawn);
    });
    this.#raws.length = blocks.length;
    while (this.children.length > blocks.length) this.lastElementChild.remove();
  }
}
customElements.define("md-view", MarkdownView);

function finishCode(drawn, language) {
  const pre = drawn.querySelector("pre");
  if (!pre) return;
  pre.tabIndex = 0; // so that a keyboard can scroll it
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  drawn.className = "code-block";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => copyText(pre.textContent, button));
  drawn.prepend(button);
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
