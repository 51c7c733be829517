// The blocks of a Markdown text that grows: a finished beginning is read once, only the open end is read again.
import { Lexer } from "../vendor/marked/marked.esm.js";

/** A block that becomes a definition if a title ends in it later: the quotes of a title may hold empty lines. */
const MAY_BE_DEFINITION = /^ {0,3}\[(?:\\[^]|[^\]\\])+\]:/;
/** The end of a definition's line, and the beginning of its title on the next one. */
const MAY_BE_TITLE = /^\n[ \t]*["'(]/;
const ENDS_WITH_EMPTY_LINE = /\n[ \t]*\n$/;

export const isDrawn = (block) => block.type !== "space" && block.type !== "def";

/** Reader of one text. The blocks of each text that it gets are those that a reader of the whole text would find. */
export class BlockReader {
  #done = ""; // the beginning that no later text changes
  #numDone = 0; // blocks of it that are drawn
  #doneLinks = {}; // definitions in it
  #links = "{}"; // all definitions, as JSON

  /**
   * Read a text. Returns `blocks`, which are the blocks from the index `start` on: those before are as they were; and
   * `hasNewLinks`: a definition came or changed, which may change any block that has a bracket; `start` is then 0.
   */
  read(text) {
    const whole = text.includes("\r") ? text.replace(/\r\n|\r/g, "\n") : text;
    if (!whole.startsWith(this.#done)) this.#forget();
    let { tokens, end } = this.#lex(whole);
    const links = JSON.stringify(tokens.links);
    const hasNewLinks = links !== this.#links;
    this.#links = links;
    if (hasNewLinks && this.#done) {
      this.#forget();
      ({ tokens, end } = this.#lex(whole));
    }
    const read = { start: this.#numDone, blocks: tokens.filter(isDrawn), hasNewLinks };
    this.#finish(tokens, end);
    return read;
  }

  #forget() {
    this.#done = "";
    this.#numDone = 0;
    this.#doneLinks = {};
  }

  #lex(whole) {
    const end = whole.slice(this.#done.length);
    return { tokens: lexed(end, this.#doneLinks), end };
  }

  /** Move the blocks to the finished beginning that no later text can change. */
  #finish(tokens, end) {
    let num = 0;
    let length = 0;
    let at = 0;
    for (const [index, token] of tokens.entries()) {
      if (!end.startsWith(token.raw, at)) break;
      // After an empty line, a whole line that begins with its first character ends lists, quotes, code, and paragraphs.
      if (/^\S/.test(token.raw) && end.includes("\n", at) && ENDS_WITH_EMPTY_LINE.test(end.slice(Math.max(0, at - 80), at))) [num, length] = [index, at];
      at += token.raw.length;
      if (token.type !== "def" ? MAY_BE_DEFINITION.test(token.raw) : MAY_BE_TITLE.test(end.slice(at - 1))) break;
    }
    if (!num) return;
    const beginning = end.slice(0, length);
    if (Object.keys(tokens.links).length > Object.keys(this.#doneLinks).length)
      this.#doneLinks = { ...lexed(beginning, this.#doneLinks).links };
    this.#done += beginning;
    this.#numDone += tokens.slice(0, num).filter(isDrawn).length;
  }
}

function lexed(text, links) {
  const lexer = new Lexer();
  Object.assign(lexer.tokens.links, links);
  return lexer.lex(text);
}
