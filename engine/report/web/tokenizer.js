/** Text ↔ token ids: characters, bytes, or byte-pair encoding as tiktoken computes it. */

const SPACE_SYMBOLS = { " ": "·", "\n": "⏎", "\t": "⇥" };
const toLetters = (text) => Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
const unifyLineEnds = (text) => text.replace(/\r\n?/g, "\n");
const toHex = (number, length) => number.toString(16).padStart(length, "0");
const makeDecoder = (fatal) => new TextDecoder("utf-8", { ignoreBOM: true, fatal });

/** A character that is not printed, as Python writes it: "\xa0". */
function escapeCharacter(character) {
  const code = character.codePointAt(0);
  if (character === "\r") return "\\r";
  return code < 0x100 ? `\\x${toHex(code, 2)}` : code < 0x10000 ? `\\u${toHex(code, 4)}` : `\\U${toHex(code, 8)}`;
}

class Tokenizer {
  /** `tokens` has the bytes of each id, a letter each, or null; `text_ids` are those of ordinary text. */
  constructor({ kind, tokens, text_ids, pattern, is_normalized, markup, text_start }) {
    Object.assign(this, { kind, tokens, markup, isNormalized: is_normalized, textStart: text_start });
    this.pattern = new RegExp(pattern, "gu");
    this.ids = new Map(text_ids.map((id) => [tokens[id], id]));
  }

  /** Throws an Error for a character that the vocabulary lacks. */
  encode(text) {
    if (this.kind === "bpe") {
      const words = (this.isNormalized ? text.normalize("NFC") : text).match(this.pattern) ?? [];
      return words.flatMap((word) => this.merge(toLetters(word)));
    }
    const pieces = this.kind === "byte" ? [...toLetters(text)] : Array.from(text, toLetters);
    const unknown = pieces.findIndex((piece) => !this.ids.has(piece));
    if (unknown >= 0) throw new Error(`The text: the vocabulary lacks “${[...text][unknown]}”. Leave it out.`);
    return pieces.map((piece) => this.ids.get(piece));
  }

  /** Encodes texts that follow each other, between ids of special tokens. */
  encodeParts(parts) {
    const ids = [];
    let text = "";
    for (const part of [...parts, null]) {
      if (typeof part === "string") {
        text += part;
        continue;
      }
      ids.push(...this.encode(text));
      text = "";
      if (part !== null) ids.push(part);
    }
    return ids;
  }

  /** Splits a text at the names of markup, which become ids. */
  splitMarkup(text) {
    const names = Object.keys(this.markup).map((name) => name.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    if (!names.length) return [text];
    return text.split(new RegExp(`(${names.join("|")})`, "u")).map((part) => this.markup[part] ?? part);
  }

  /** Merges the neighbors that form the token of the lowest id, until none do. */
  merge(word) {
    if (this.ids.has(word)) return [this.ids.get(word)];
    const pieces = [...word];
    const rank = (i) => (i + 1 < pieces.length ? this.ids.get(pieces[i] + pieces[i + 1]) ?? Infinity : Infinity);
    const ranks = pieces.map((_, i) => rank(i));
    for (;;) {
      const lowest = ranks.reduce((a, b) => Math.min(a, b));
      if (lowest === Infinity) return pieces.map((piece) => this.ids.get(piece));
      const at = ranks.indexOf(lowest);
      pieces.splice(at, 2, pieces[at] + pieces[at + 1]);
      ranks.splice(at, 2, rank(at));
      if (at > 0) ranks[at - 1] = rank(at - 1);
    }
  }

  /** The UTF-8 bytes of ids; those that have none are left out. */
  bytes(ids) {
    return Uint8Array.from(ids.map((id) => this.tokens[id] ?? "").join(""), (letter) => letter.charCodeAt(0));
  }

  hasStart(ids) {
    return this.textStart.every((id, i) => ids[i] === id);
  }

  decode(ids) {
    return makeDecoder(false).decode(this.bytes(this.hasStart(ids) ? ids.slice(this.textStart.length) : ids));
  }

  /** Whether ids are the bytes of one character. */
  isCharacter(ids) {
    const text = makeDecoder(false).decode(this.bytes(ids));
    return [...text].length === 1 && (text !== "\ufffd" || this.bytes(ids).length === 3);
  }

  /** Tokens as visible text: space as ·, newline as ⏎, bytes as ⟨e2 82⟩. */
  label(...ids) {
    if (ids.some((id) => typeof this.tokens[id] !== "string")) return `⟨unused ${ids[0]}⟩`;
    const bytes = this.bytes(ids);
    try {
      const isHidden = (character) => /[\p{C}\p{Z}]/u.test(character);
      return Array.from(makeDecoder(true).decode(bytes), (character) =>
        SPACE_SYMBOLS[character] ?? (isHidden(character) ? escapeCharacter(character) : character)).join("");
    } catch {
      return `⟨${Array.from(bytes, (byte) => toHex(byte, 2)).join(" ")}⟩`;
    }
  }
}
