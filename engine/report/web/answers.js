/** Answers to the questions of a model's page. A worker runs this script. */

const LIKELY_TOKENS = { temperature: 1, top_k: 10, top_p: 1 };
const MAX_INSPECTED_TOKENS = 4096;
const MAX_PROMPT_CHARACTERS = 50_000;
const MAX_THUMBNAIL_TOKENS = 32;
const MAX_CHARACTER_TOKENS = 4;
const MAX_PROBE_ERROR = 0.01;  // of a logit

/** A model, perhaps without some heads, with the cache of its last context. */
class Decoder {
  constructor(model, off = []) {
    const keys = off.map(([layer, head]) => `${layer - 1} ${head - 1}`);
    const zeros = new Float32Array(model.config.head_width);
    this.look = (layer, head) => keys.includes(`${layer} ${head}`) ? zeros : undefined;
    Object.assign(this, { model, off: String(off), ids: [], cache: model.makeCache() });
  }

  /** The logits after ids, (V), of which the context is from findWindowStart() on. */
  logitsAfter(ids) {
    const context = ids.slice(findWindowStart(ids.length, this.model.config.context_length));
    let length = 0;
    while (length < context.length - 1 && context[length] === this.ids[length]) length++;
    for (const { keys, values } of this.cache.flat()) keys.length = values.length = length;
    this.ids = context;
    return context.slice(length).map((id) => this.model.forward(id, this.cache, this.look)).at(-1);
  }
}

/** Where the context of the next token starts in `length` tokens. */
function findWindowStart(length, contextLength) {
  const stride = (contextLength + 1) >> 1;
  return Math.ceil(Math.max(0, length - contextLength) / stride) * stride;
}

const describeLimit = (limit) => `reached its limit of ${limit} token${limit === 1 ? "" : "s"}`;

function logSoftmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b));
  const total = logits.reduce((before, logit) => before + Math.exp(logit - largest), 0);
  return logits.map((logit) => logit - largest - Math.log(total));
}

/** Bytes of lower triangles: b is the weight (b / 255)². */
const toLevels = (maps) =>
  Uint8Array.from(maps.flat().flatMap((row) => [...row]), (weight) => Math.round(Math.sqrt(weight) * 255));

/** The largest weights of a map in each of at most MAX_THUMBNAIL_TOKENS rows and columns. */
function shrink(map) {
  const size = Math.min(map.length, MAX_THUMBNAIL_TOKENS);
  const bins = Array.from({ length: size }, (_, i) =>
    [Math.floor(i * map.length / size), Math.ceil((i + 1) * map.length / size)]);
  return bins.map(([top, bottom], row) => bins.slice(0, row + 1).map(([left, right]) =>
    Math.max(0, ...map.slice(top, bottom).flatMap((weights) => [...weights.slice(left, right)]))));
}

/** Each generator answers a question of the page, with objects. */
class Inspector {
  /** Throws an Error if model.py computed other logits: its layers were changed in a way that has no name. */
  constructor({ config, tokenizer, probe, ...content }, weights) {
    Object.assign(this, { content, tokenizer: new Tokenizer(tokenizer) });
    this.model = new GPT(config, weights);
    this.full = new Decoder(this.model);
    this.ablated = this.full;
    const logits = this.full.logitsAfter(probe.ids);
    if (probe.logits.some((logit, id) => Math.abs(logit - logits[id]) > MAX_PROBE_ERROR)) {
      throw new Error("The page does not compute what model.py computed. Use sample.py without --page.");
    }
  }

  /** Completes a question with its ids. Throws an Error for a text that is too long. */
  parse({ text = "", ids = [], turns = [], ...question }) {
    const longest = Math.max(...[text, ...turns].map((each) => each.length));
    if (longest > MAX_PROMPT_CHARACTERS) throw new Error("The text: must have at most 50,000 characters. Shorten it.");
    const all = ids.length ? [...ids, ...this.tokenizer.encode(text)] : this.encodePrompt(text);
    if (all.length > MAX_INSPECTED_TOKENS) throw new Error("The text: must have at most 4,096 tokens. Shorten it.");
    return { ...question, turns, ids: all };
  }

  encodePrompt(text) {
    const { content: { prompt_suffix: suffix, initial_tokens }, tokenizer } = this;
    const bare = suffix && text.endsWith(suffix) ? text.slice(0, -suffix.length) : text;
    const ids = tokenizer.encodeParts(tokenizer.splitMarkup(unifyLineEnds(text && bare + suffix)));
    const all = tokenizer.hasStart(ids) ? ids : [...tokenizer.textStart, ...ids];
    return all.length ? all : initial_tokens;
  }

  /** The logits after ids of the model and, if heads are off, of that without them. */
  logitsAfter(ids, off) {
    if (off.length && this.ablated.off !== String(off)) this.ablated = new Decoder(this.model, off);
    return [this.full, ...off.length ? [this.ablated] : []].map((decoder) => decoder.logitsAfter(ids));
  }

  /** The weights to sample by, [[id, weight], …]. */
  filter(logits, question) {
    const allowed = logits.at(-1).slice();
    for (const id of this.content.banned) allowed[id] = -Infinity;
    return filterLogits(allowed, question);
  }

  /** Describes the logits of one or two models, the weights to sample by, and the next id if it is known. */
  describe(id, logits, weights) {
    const logP = logits.map(logSoftmax);
    const [full, without] = [logP[0], logP.at(-1)];
    const total = sum(weights.map(([, weight]) => weight));
    const drawn = new Map(weights.map(([each, weight]) => [each, weight / total]));
    const p = (each) => [Math.exp(full[each]), Math.exp(without[each]), drawn.get(each) ?? 0];
    const largest = filterLogits(full.map((value, i) => Math.max(value, without[i])), LIKELY_TOKENS);
    const likely = largest.map(([each]) => [each, this.tokenizer.label(each), ...p(each)]);
    if (id === undefined) return { likely };
    return { likely, id, text: this.tokenizer.label(id), p: p(id), bits: [full[id], without[id]].map((x) => -x / Math.LN2) };
  }

  /** If the last ids are the bytes of one character, returns how many and the character. */
  findShared(ids) {
    for (let count = 1; count <= Math.min(ids.length, MAX_CHARACTER_TOKENS); count++) {
      const last = ids.slice(-count);
      if (this.tokenizer.characters(last).length === 1) return count > 1 ? [count, this.tokenizer.label(...last)] : null;
    }
    return null;
  }

  *read({ ids, off, ...question }) {
    const tokens = [{ id: ids[0], text: this.tokenizer.label(ids[0]) }];
    for (let length = 1; length <= ids.length; length++) {
      const before = ids.slice(0, length);
      tokens.at(-1).shared = this.findShared(before);
      const logits = this.logitsAfter(before, off);
      tokens.push(this.describe(ids[length], logits, this.filter(logits, question)));
      yield;  // the worker may stop here
    }
    yield { next: tokens.pop(), tokens, text: this.tokenizer.decode(ids) };
  }

  *predict({ ids, off, at, ...question }) {
    const before = ids.slice(0, at || ids.length);
    const logits = this.logitsAfter(before, off);
    yield this.describe(ids[before.length], logits, this.filter(logits, question));
  }

  /** Yields {id, ids, logits, weights, text} for each new token; then {isEnded}: whether the model ended the text. */
  *generate(prompt, limit, { off, seed, ...question }) {
    const rowSeed = makeRowSeed(seed, prompt);
    const decoder = makeDecoder(false);
    const ids = [...prompt];
    let isEnded = false;
    while (!isEnded && ids.length < prompt.length + limit) {
      const logits = this.logitsAfter(ids, off);
      const weights = this.filter(logits, question);
      const id = drawId(weights, rowSeed, ids.length - prompt.length);
      ids.push(id);
      isEnded = this.content.stop_ids.includes(id);
      yield { id, ids, logits, weights, text: isEnded ? "" : decoder.decode(this.tokenizer.bytes([id]), { stream: true }) };
    }
    yield { isEnded };
  }

  *write(question) {
    const limit = Math.min(question.max_new_tokens, MAX_INSPECTED_TOKENS - question.ids.length);
    if (!limit) throw new Error("The text: too long to continue. Start a new one.");
    yield* this.read(question);
    for (const { id, ids, logits, weights, text, isEnded } of this.generate(question.ids, limit, question)) {
      if (logits) yield { token: { ...this.describe(id, logits, weights), shared: this.findShared(ids) }, text };
      else yield { end: isEnded ? "the model ended the text" : describeLimit(limit) };
    }
  }

  *chat(question) {
    const { turns, max_new_tokens } = question;
    const { context_length } = this.model.config;
    const maxLength = context_length - Math.min(max_new_tokens, context_length >> 1);
    let start = 0;
    while (start < turns.length - 1 && this.encodeChat(turns.slice(start)).length > maxLength) start += 2;
    const ids = this.encodeChat(turns.slice(start));
    if (ids.length >= context_length) throw new Error("The message: longer than the context. Shorten it.");
    const limit = Math.min(max_new_tokens, context_length - ids.length);
    let last;
    for (const piece of this.generate(ids, limit, question)) {
      if (piece.logits) yield { text: piece.text };
      else yield { end: piece.isEnded ? "the model ended its answer" : describeLimit(limit), isShortened: start > 0, ids: last };
      last = piece.ids;
    }
  }

  encodeChat(turns) {
    const [first, afterQuestion, afterAnswer, last] = this.content.chat;
    return this.tokenizer.encodeParts(turns.flatMap((turn, i) => {
      const text = unifyLineEnds(turn);
      if (i % 2) return [...this.tokenizer.splitMarkup(text), ...afterAnswer];
      return [...i ? [] : first, text, ...i < turns.length - 1 ? afterQuestion : last];
    }));
  }

  /** Computes the maps of all heads in the window of `at`, unless they are the last ones. */
  *computeMaps({ ids, at, off }) {
    const { context_length, num_layers, num_heads } = this.model.config;
    const start = findWindowStart(at + 1, context_length);
    const window = ids.slice(start, start + context_length);
    const key = JSON.stringify([window, off]);
    if (this.maps?.key !== key) {
      const maps = Array.from({ length: num_layers * num_heads }, () => []);
      const { look, cache } = new Decoder(this.model, off);
      for (const id of window) {
        this.model.forward(id, cache, (layer, head, attention) => {
          maps[layer * num_heads + head].push(attention);
          return look(layer, head);
        });
        yield;
      }
      this.maps = { key, start, size: window.length, maps, ids: window };
    }
    return this.maps;
  }

  *heads(question) {
    const { size, maps, ids } = yield* this.computeMaps(question);
    const texts = ids.map((id) => makeDecoder(false).decode(this.tokenizer.bytes([id])));
    const habits = nameHeads(maps.length, (head, i, j) => maps[head][i][j], ids, texts);
    yield { size: Math.min(size, MAX_THUMBNAIL_TOKENS), weights: toLevels(maps.map(shrink)), habits };
  }

  *attention(question) {
    const { start, size, maps } = yield* this.computeMaps(question);
    const { layer, head } = question;
    yield { start, size, weights: toLevels([maps[(layer - 1) * this.model.config.num_heads + head - 1]]) };
  }

  *measure({ ids }) {
    const { num_layers, num_heads } = this.model.config;
    const bits = yield* this.meanBits(ids, []);
    yield { bits };
    for (let layer = 1; layer <= num_layers; layer++) {
      for (let head = 1; head <= num_heads; head++) {
        yield { layer, head, bits: (yield* this.meanBits(ids, [[layer, head]])) - bits };
      }
    }
  }

  /** The mean surprise of ids after the first, in bits, without some heads. */
  *meanBits(ids, off) {
    const decoder = new Decoder(this.model, off);
    let total = 0;
    for (let length = 1; length < ids.length; length++) {
      total -= logSoftmax(decoder.logitsAfter(ids.slice(0, length)))[ids[length]] / Math.LN2;
      yield;
    }
    return total / Math.max(1, ids.length - 1);
  }
}
