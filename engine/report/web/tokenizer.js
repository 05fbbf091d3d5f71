/** Text ↔ token ids: characters, bytes, or byte-pair encoding as splintr computes it. */

const SPACE_SYMBOLS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "\\r" };
const unifyLineEnds = (text) => text.replace(/\r\n?/g, "\n");
const toLetters = (text) => Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");
const toHex = (number, length) => number.toString(16).padStart(length, "0");
const makeDecoder = (fatal) => new TextDecoder("utf-8", { ignoreBOM: true, fatal });

/** A character as a label shows it; one that is not printed as Python writes it: "\xa0". */
function showCharacter(character) {
  if (character in SPACE_SYMBOLS || !/[\p{C}\p{Z}]/u.test(character)) return SPACE_SYMBOLS[character] ?? character;
  const code = character.codePointAt(0);
  return code < 0x100 ? `\\x${toHex(code, 2)}` : code < 0x10000 ? `\\u${toHex(code, 4)}` : `\\U${toHex(code, 8)}`;
}

class Tokenizer {
  /** `tokens` has the bytes of each id, a letter each, or null; `text_ids` are those of ordinary text. */
  constructor({ kind, tokens, text_ids, pattern, merged_ids, normalization, markup, text_start }) {
    Object.assign(this, { kind, tokens, normalization, textStart: text_start });
    this.markup = new Map(markup);
    this.pattern = new RegExp(pattern, "gu");
    this.ids = new Map(text_ids.map((id) => [tokens[id], id]));
    this.ranks = new Map(merged_ids.map((id, rank) => [tokens[id], rank]));
  }

  /** Throws an Error for a character that the vocabulary lacks. */
  encode(text) {
    if (this.kind === "byte-level BPE") {
      const words = (this.normalization ? text.normalize(this.normalization) : text).match(this.pattern) ?? [];
      return words.flatMap((word) => this.merge(toLetters(word)));
    }
    const pieces = this.kind === "byte" ? [...toLetters(text)] : Array.from(text, toLetters);
    const unknown = pieces.findIndex((piece) => !this.ids.has(piece));
    if (unknown >= 0) throw new Error(`The text: the vocabulary lacks “${[...text][unknown]}”. Leave it out.`);
    return pieces.map((piece) => this.ids.get(piece));
  }

  /** Merges the neighbors that form the token of the earliest merge, until none do. */
  merge(word) {
    if (this.ids.has(word)) return [this.ids.get(word)];
    const pieces = [...word];
    const rank = (i) => (i + 1 < pieces.length ? this.ranks.get(pieces[i] + pieces[i + 1]) ?? Infinity : Infinity);
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

  /** Encodes texts that follow each other, and ids of special tokens between them. */
  encodeParts(parts) {
    const isText = (part) => typeof part === "string";
    const joined = parts.reduce((before, part) =>
      isText(part) && isText(before.at(-1)) ? [...before.slice(0, -1), before.at(-1) + part] : [...before, part], []);
    return joined.flatMap((part) => isText(part) ? this.encode(part) : part);
  }

  /** Splits a text at the names of markup, which become ids. */
  splitMarkup(text) {
    const names = [...this.markup.keys()].map((name) => name.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
    if (!names.length) return [text];
    return text.split(new RegExp(`(${names.join("|")})`, "u")).map((part) => this.markup.get(part) ?? part);
  }

  hasStart(ids) {
    return this.textStart.every((id, i) => ids[i] === id);
  }

  /** The UTF-8 bytes of ids; those that have none are left out. */
  bytes(ids) {
    return Uint8Array.from(ids.map((id) => this.tokens[id] ?? "").join(""), (letter) => letter.charCodeAt(0));
  }

  decode(ids) {
    return makeDecoder(false).decode(this.bytes(this.hasStart(ids) ? ids.slice(this.textStart.length) : ids));
  }

  /** The characters of ids; none if their bytes are not UTF-8. */
  characters(ids) {
    try {
      return [...makeDecoder(true).decode(this.bytes(ids))];
    } catch {
      return [];
    }
  }

  /** Tokens as visible text: space as ·, newline as ⏎, bytes as ⟨e2 82⟩. */
  label(...ids) {
    if (ids.some((id) => typeof this.tokens[id] !== "string")) return `⟨unused ${ids[0]}⟩`;
    const bytes = Array.from(this.bytes(ids), (byte) => toHex(byte, 2));
    const characters = this.characters(ids);
    return characters.length || !bytes.length ? characters.map(showCharacter).join("") : `⟨${bytes.join(" ")}⟩`;
  }
}
