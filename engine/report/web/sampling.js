/** Sampling: a seed draws the tokens that engine/generation/sampling.py draws. */

const MASK = (1n << 64n) - 1n;
const GOLDEN_GAMMA = 0x9E3779B97F4A7C15n;  // of SplitMix64
const MIX_STEPS = [[30n, 0xBF58476D1CE4E5B9n], [27n, 0x94D049BB133111EBn]];
const MIN_TEMPERATURE = 1e-4;  // below it the most likely token is chosen
const FIRST_CANDIDATES_RANGE = 8;  // below the largest logit: to sort a large vocabulary takes longer
const TOP_P_ROUNDING = 2 ** -23;

/** Returns [[id, weight], …] of the tokens that temperature, top-k and top-p leave. */
function filterLogits(logits, { temperature, top_k, top_p }) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!Number.isFinite(largest)) throw new Error("The logits are not finite: the model diverged.");
  if (temperature < MIN_TEMPERATURE) return [[logits.indexOf(largest), 1]];
  const scaled = logits.map((logit) => (logit - largest) / Math.fround(temperature));
  if (!top_k && top_p === 1) return Array.from(scaled, (value, id) => [id, Math.fround(Math.exp(value))]);
  return keepLikelyTokens(scaled, top_k, top_p, FIRST_CANDIDATES_RANGE) ?? keepLikelyTokens(scaled, top_k, top_p, Infinity);
}

/** Returns [[id, weight], …] of the likely tokens, the most likely first; null if `range` cuts some of them. */
function keepLikelyTokens(scaled, top_k, top_p, range) {
  const candidates = [];
  scaled.forEach((value, id) => value >= -range && candidates.push(id));
  const likely = candidates.sort((a, b) => scaled[b] - scaled[a] || a - b).slice(0, top_k ?? scaled.length);
  const isComplete = range === Infinity || likely.length === top_k;
  if (top_k && !isComplete) return null;
  const ofSum = top_k ? likely.map((id) => scaled[id]) : scaled;
  const total = ofSum.reduce((before, value) => before + Math.exp(value), 0);
  const limit = top_p < 1 ? top_p * (1 - TOP_P_ROUNDING) * total : Infinity;
  const kept = [];
  let totalBefore = 0;
  for (const id of likely) {
    if (totalBefore >= limit) return kept;
    kept.push([id, Math.fround(Math.exp(scaled[id]))]);
    totalBefore += Math.exp(scaled[id]);
  }
  return isComplete ? kept : null;
}

/** Draws an id: that of the largest weight / noise, which depends on the row's seed, the step and the id. */
function drawId(weightedIds, rowSeed, step) {
  if (weightedIds.length === 1) return weightedIds[0][0];
  const start = rowSeed + GOLDEN_GAMMA * (BigInt(step) << 32n);
  let best = [-1, -1];
  for (const [id, weight] of weightedIds) {
    const rate = weight && Math.fround(weight / makeNoise(start + BigInt(id) * GOLDEN_GAMMA));
    if (rate > best[1]) best = [id, rate];
  }
  return best[0];
}

/** Returns a sample of Exponential(1), a function of 64 bits. */
function makeNoise(state) {
  const mixed = MIX_STEPS.reduce((x, [shift, factor]) => (x ^ (x >> shift)) * factor & MASK, state & MASK);
  const uniform = Math.fround(Math.fround(Number(mixed >> 32n)) + 0.5) * ((1 - 2 ** -24) / 2 ** 32);
  return Math.fround(-Math.log1p(-Math.fround(uniform)));
}

/** Returns the seed of the text after a prompt. */
function makeRowSeed(seed, ids) {
  const integers = new Uint8Array(BigInt64Array.from(ids, BigInt).buffer);
  return hashBytes(Uint8Array.from([...new TextEncoder().encode(`${seed} 0 `), ...integers]));
}

// Of BLAKE2b: RFC 7693.
const HASH_START = [
  0x6A09E667F3BCC908n, 0xBB67AE8584CAA73Bn, 0x3C6EF372FE94F82Bn, 0xA54FF53A5F1D36F1n,
  0x510E527FADE682D1n, 0x9B05688C2B3E6C1Fn, 0x1F83D9ABFB41BD6Bn, 0x5BE0CD19137E2179n];
const BLOCK_BYTES = 128;
const WORD_ORDERS = ["0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0"];
const LANES = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]];
const rotateRight = (x, count) => (x >> count | x << 64n - count) & MASK;

/** Returns the BLAKE2b hash of bytes, of 8 bytes, as a number. */
function hashBytes(bytes) {
  const state = [...HASH_START];
  state[0] ^= 0x01010008n;  // no key, and a digest of 8 bytes
  for (let start = 0; start < bytes.length; start += BLOCK_BYTES) {
    const block = new Uint8Array(BLOCK_BYTES);
    block.set(bytes.subarray(start, start + BLOCK_BYTES));
    const v = [...state, ...HASH_START];
    v[12] ^= BigInt(Math.min(start + BLOCK_BYTES, bytes.length));
    if (start + BLOCK_BYTES >= bytes.length) v[14] ^= MASK;
    for (let round = 0; round < 12; round++) mixRound(v, new BigUint64Array(block.buffer), WORD_ORDERS[round % 10]);
    state.forEach((_, i) => { state[i] ^= v[i] ^ v[i + 8]; });
  }
  return state[0];
}

function mixRound(v, words, order) {
  LANES.forEach(([a, b, c, d], lane) => {
    [[32n, 24n], [16n, 63n]].forEach(([first, second], half) => {
      v[a] = v[a] + v[b] + words[parseInt(order[2 * lane + half], 16)] & MASK;
      v[d] = rotateRight(v[d] ^ v[a], first);
      v[c] = v[c] + v[d] & MASK;
      v[b] = rotateRight(v[b] ^ v[c], second);
    });
  });
}
