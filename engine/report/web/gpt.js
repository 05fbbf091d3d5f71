/** The model that model.py defines, in plain JavaScript, for one token after the other.
 *
 *  D d_model   H heads   G head groups   K head_dim   F d_ff   V vocabulary   S cached positions
 */

const identity = { forward: (x) => x };
const add = (x, y) => x.map((value, i) => value + y[i]);

function dot(x, y) {
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i] * y[i];
  return total;
}

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = scores.map((score) => Math.exp(score - largest));
  const total = sum(weights);
  return weights.map((weight) => weight / total);
}

/** The tensors of a safetensors file, by name. */
class Weights {
  constructor(bytes) {
    const headerLength = Number(new DataView(bytes.buffer).getBigUint64(0, true));
    this.bytes = bytes;
    this.start = 8 + headerLength;
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, this.start)));
  }

  /** A tensor's numbers, row by row; undefined if there is no such tensor. */
  get(name) {
    if (!(name in this.header)) return undefined;
    const { dtype, data_offsets: [start, end] } = this.header[name];
    const Numbers = { I8: Int8Array, F32: Float32Array }[dtype];
    return new Numbers(this.bytes.buffer, this.start + start, (end - start) / Numbers.BYTES_PER_ELEMENT);
  }
}

/** A matrix of 8-bit integers with a scale for each row, and perhaps a bias. */
class Linear {
  constructor(weights, name) {
    this.integers = weights.get(`${name}.weight`);
    this.scales = weights.get(`${name}.scales`);
    this.bias = weights.get(`${name}.bias`);
    this.columns = this.integers.length / this.scales.length;
  }

  /** (columns) → (rows) */
  forward(x) {
    const { integers, scales, bias, columns } = this;
    const y = new Float32Array(scales.length);
    let at = 0;
    for (let row = 0; row < y.length; row++) {
      let even = 0;  // two sums, which a processor computes at the same time
      let odd = 0;
      let column = 0;
      for (; column + 1 < columns; column += 2, at += 2) {
        even += integers[at] * x[column];
        odd += integers[at + 1] * x[column + 1];
      }
      if (column < columns) even += integers[at++] * x[column];
      y[row] = (even + odd) * scales[row] + (bias ? bias[row] : 0);
    }
    return y;
  }

  /** A row, of an embedding: (columns) */
  row(index) {
    const row = this.integers.subarray(index * this.columns, (index + 1) * this.columns);
    return Float32Array.from(row).map((integer) => integer * this.scales[index]);
  }
}

/** Root-mean-square norm, or layer norm, with a weight if the model has one. */
class Norm {
  constructor(weights, name, { epsilon }, isLayerNorm = false) {
    Object.assign(this, { epsilon, isLayerNorm });
    this.weight = weights.get(`${name}.weight`);
    this.bias = weights.get(`${name}.bias`);
  }

  forward(x) {
    const { weight, bias } = this;
    const mean = this.isLayerNorm ? sum(x) / x.length : 0;
    const centered = x.map((value) => value - mean);
    const scale = 1 / Math.sqrt(dot(centered, centered) / x.length + this.epsilon);
    return centered.map((value, i) => value * scale * (weight ? weight[i] : 1) + (bias ? bias[i] : 0));
  }
}

const makeNorm = (weights, name, config) => new Norm(weights, name, config, config.norm === "layernorm");

/** Rotates each pair of dimensions (i, i + K / 2) of x by the angle of a position: RoPE. */
function rotate(x, angles) {
  if (!angles) return x;
  const half = x.length / 2;
  const y = new Float32Array(x.length);
  for (let i = 0; i < half; i++) {
    const cos = Math.cos(angles[i]);
    const sin = Math.sin(angles[i]);
    y[i] = x[i] * cos + x[i + half] * sin;
    y[i + half] = x[i + half] * cos - x[i] * sin;
  }
  return y;
}

/** Attention head; the first of a group has its key and value. */
class Head {
  constructor(weights, name, startsGroup) {
    this.query = new Linear(weights, `${name}.query`);
    if (!startsGroup) return;
    this.key = new Linear(weights, `${name}.key`);
    this.value = new Linear(weights, `${name}.value`);
  }

  /** The weights of cached positions, of which the last `window` are visible: (S) */
  attention(q, keys, window) {
    const first = window ? Math.max(0, keys.length - window) : 0;
    const scores = new Float64Array(keys.length).fill(-Infinity);
    for (let s = first; s < keys.length; s++) scores[s] = dot(q, keys[s]) / Math.sqrt(q.length);
    return softmax(scores);
  }

  /** The weighted mean of the values: (K) */
  forward(attention, values) {
    const mean = new Float32Array(values[0].length);
    attention.forEach((weight, s) => {
      if (weight) for (let i = 0; i < mean.length; i++) mean[i] += weight * values[s][i];
    });
    return mean;
  }
}

/** List of heads and a projection that mixes their outputs. */
class MultiHeadAttention {
  constructor(weights, name, config, window) {
    this.window = window;
    this.groupSize = config.num_heads / config.num_groups;
    this.heads = Array.from({ length: config.num_heads }, (_, h) =>
      new Head(weights, `${name}.heads.${h}`, h % this.groupSize === 0));
    const makeQKNorm = (norm) => config.qk_norm ? new Norm(weights, `${name}.heads.0.${norm}`, config) : identity;
    this.queryNorm = makeQKNorm("query_norm");
    this.keyNorm = makeQKNorm("key_norm");
    this.projection = new Linear(weights, `${name}.projection`);
  }

  /** (D) → (D). `cache` has the keys and values of each group; `look` may replace the output of a head. */
  forward(x, angles, cache, look) {
    const outputs = this.heads.map((head, h) => {
      const group = (h - h % this.groupSize) / this.groupSize;
      const { keys, values } = cache[group];
      if (h % this.groupSize === 0) {
        keys.push(rotate(this.keyNorm.forward(head.key.forward(x)), angles));
        values.push(head.value.forward(x));
      }
      const q = rotate(this.queryNorm.forward(head.query.forward(x)), angles);
      const attention = head.attention(q, keys, this.window);
      return look(h, attention) ?? head.forward(attention, values);
    });
    return this.projection.forward(Float32Array.from(outputs.flatMap((output) => [...output])));
  }
}

const ACTIVATIONS = {
  swiglu: (x) => x / (1 + Math.exp(-x)),
  relu2: (x) => Math.max(0, x) ** 2,
  gelu: (x) => x / 2 * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))),
  relu: (x) => Math.max(0, x),
};

/** Two linear layers with a non-linearity or a gate between them. */
class FeedForward {
  constructor(weights, name, { activation }) {
    this.gate = activation === "swiglu" ? new Linear(weights, `${name}.gate`) : null;
    this.expand = new Linear(weights, `${name}.expand`);
    this.contract = new Linear(weights, `${name}.contract`);
    this.activation = ACTIVATIONS[activation];
  }

  /** (D) → (F) → (D) */
  forward(x) {
    const expanded = this.expand.forward(x);
    const hidden = (this.gate ? this.gate.forward(x) : expanded).map(this.activation);
    return this.contract.forward(this.gate ? hidden.map((value, i) => value * expanded[i]) : hidden);
  }
}

/** Attention and a feed-forward layer, each added to the residual stream. */
class Block {
  constructor(weights, name, config, window) {
    this.postNorm = config.norm_placement === "post";
    this.attentionNorm = makeNorm(weights, `${name}.attention_norm`, config);
    this.attention = new MultiHeadAttention(weights, `${name}.attention`, config, window);
    this.feedForwardNorm = makeNorm(weights, `${name}.feed_forward_norm`, config);
    this.feedForward = new FeedForward(weights, `${name}.feed_forward`, config);
  }

  /** (D) → (D) */
  forward(x, ...context) {
    if (this.postNorm) {
      const y = this.attentionNorm.forward(add(x, this.attention.forward(x, ...context)));
      return this.feedForwardNorm.forward(add(y, this.feedForward.forward(y)));
    }
    const y = add(x, this.attention.forward(this.attentionNorm.forward(x), ...context));
    return add(y, this.feedForward.forward(this.feedForwardNorm.forward(y)));
  }
}

/** Decoder-only Transformer: a token in, logits of the next token out. */
class GPT {
  constructor(config, weights) {
    this.config = config;
    const hasEmbeddingNorm = config.norm === "rmsnorm" && !config.tie_embeddings;
    this.tokenEmbedding = new Linear(weights, "token_embedding");
    this.positionEmbedding = config.position === "learned" ? new Linear(weights, "position_embedding") : null;
    this.embeddingNorm = hasEmbeddingNorm ? makeNorm(weights, "embedding_norm", config) : identity;
    this.blocks = config.layer_windows.map((window, l) => new Block(weights, `blocks.${l}`, config, window));
    this.finalNorm = config.norm_placement === "pre" ? makeNorm(weights, "final_norm", config) : identity;
    this.head = config.tie_embeddings ? this.tokenEmbedding : new Linear(weights, "head");
  }

  /** An empty cache: for each layer and group, the keys and values of positions, (S, K). */
  makeCache() {
    return this.blocks.map(() => Array.from({ length: this.config.num_groups }, () => ({ keys: [], values: [] })));
  }

  /** Appends a token to a cache: logits (V). `look(layer, head, attention)` may replace the output of a head. */
  forward(token, cache, look = () => {}) {
    const { logit_softcap: cap, position, frequencies } = this.config;
    const at = cache[0][0].keys.length;
    const angles = position === "rope" ? frequencies.map((frequency) => Math.fround(at * frequency)) : null;
    let x = this.embed(token, at);
    this.blocks.forEach((block, l) => {
      x = block.forward(x, angles, cache[l], (h, attention) => look(l, h, attention));
    });
    const logits = this.head.forward(this.finalNorm.forward(x));
    return cap ? logits.map((logit) => cap * Math.tanh(logit / cap)) : logits;
  }

  /** The first block's input for a token at a position: (D) */
  embed(token, at) {
    const { d_model: D, position, scale_embeddings, frequencies } = this.config;
    let x = this.tokenEmbedding.row(token);
    if (scale_embeddings) x = x.map((value) => value * Math.sqrt(D));
    if (this.positionEmbedding) x = add(x, this.positionEmbedding.row(at));
    if (position === "sinusoidal") {
      x = x.map((value, i) => value + Math[i % 2 ? "cos" : "sin"](Math.fround(at * frequencies[i >> 1])));
    }
    return this.embeddingNorm.forward(x);
  }
}
