/** Habits of attention: names for what heads do. engine/report/habits.py has the same scores. */

const sum = (x) => x.reduce((total, value) => total + value, 0);
const MIN_NAMED_EXCESS = 0.2;  // over equal weights, as a fraction of the largest possible
// Whether position i has the habit if it looks at position j.
const HABITS = {
  "itself": (i, j) => j === i,
  "previous token": (i, j) => j === i - 1,
  "first token": (i, j) => j === 0 && i > 0,
  "same token before": (i, j, { ids }) => j < i && ids[j] === ids[i],
  "after the same token": (i, j, { afterSame }) => j < i && j === afterSame[i],  // an induction head
  "line start": (i, j, { startsLine }) => j < i && startsLine[j],
};

/** Lists the habits that a text allows, each with the pairs of positions where it looks. */
function listHabits(ids, texts) {
  const startsLine = [true];  // a line's indentation, and its first word
  texts.forEach((text, i) => {
    startsLine.push(text.includes("\n") || (startsLine[i] && /^[\p{White_Space}\x1c-\x1f]+$/u.test(text)));
  });
  const afterSame = ids.map((id, i) => ids.slice(0, i).lastIndexOf(id) + 1 || -1);
  return Object.entries(HABITS).map(([title, looks]) => {
    const pairs = ids.flatMap((_, i) => ids.slice(0, i + 1).flatMap((_, j) =>
      looks(i, j, { ids, afterSame, startsLine }) ? [[i, j]] : []));
    const numRows = new Set(pairs.map(([i]) => i)).size || 1;
    return { title, pairs, numRows, equal: sum(pairs.map(([i]) => 1 / (i + 1))) / numRows };
  });
}

/** Names heads by the habit whose mean weight exceeds most that of equal weights: [title, weight] or null for each.
 *
 *  `weigh(head, i, j)` returns the weight with which position i looks at j.
 */
function nameHeads(numHeads, weigh, ids, texts) {
  const habits = listHabits(ids, texts);
  return Array.from({ length: numHeads }, (_, head) => {
    const scores = habits.map(({ title, pairs, numRows, equal }) => {
      const weight = sum(pairs.map(([i, j]) => weigh(head, i, j))) / numRows;
      return { title, weight, excess: (weight - equal) / Math.max(1 - equal, 1e-6) };
    });
    const best = scores.reduce((a, b) => (b.excess > a.excess ? b : a));
    return best.excess > MIN_NAMED_EXCESS ? [best.title, Math.round(1000 * best.weight) / 1000] : null;
  });
}
