/** The page of several runs: which is better, their texts side by side, and the settings that differ. */

const TOKENIZER_WARNING = "The runs have different tokenizers: compare bits per byte, not nats or perplexity.";
const RESULT_COLUMNS = [
  ["bits per byte", (run) => run.best?.val_bits_per_byte, (value) => value.toFixed(4)],
  ["loss, nats per token", (run) => run.best?.val_loss, (value) => value.toFixed(4)],
  ["perplexity", (run) => run.best?.val_perplexity, formatAmount],
  ["score, %", (run) => run.best?.val_score, (value) => (100 * value).toFixed(1)],
  ["at step", (run) => run.best?.step, formatCount], ["parameters", (run) => run.about.parameters, formatCount],
  ["tokens", (run) => run.num_tokens, formatCount], ["time", (run) => run.state?.seconds, formatSeconds],
];

const listWarnings = (runs) => new Set(runs.map((run) => run.about.tokenizer)).size > 1 ? [TOKENIZER_WARNING] : [];

/** Makes the table of results, a row for each run, sorted by the column whose heading is clicked. */
function makeResultTable(runs) {
  const columns = RESULT_COLUMNS.filter(([, read]) => runs.some((run) => Number.isFinite(read(run))));
  const buttons = columns.map(([title], i) => makeButton(title, () => draw(i)));
  const box = makeTable(["run", ...buttons], [], "Results, scrolls sideways");
  const format = (run) => columns.map(([, read, show]) => Number.isFinite(read(run)) ? show(read(run)) : "–");
  const draw = (column) => {
    const read = columns[column][1];
    const order = [...runs].sort((a, b) => (read(a) ?? Infinity) - (read(b) ?? Infinity));
    buttons.forEach((button) => button.parentNode.removeAttribute("aria-sort"));
    buttons[column].parentNode.setAttribute("aria-sort", "ascending");
    box.querySelector("tbody").replaceChildren(...makeRows(order.map((run) => [run.name, ...format(run)])));
  };
  box.firstChild.id = "results";
  if (columns.length) draw(0);
  return box;
}

/** Shows what the used checkpoints wrote after prompts that all runs have. */
function showSamplesBeside(runs) {
  const texts = runs.map(({ samples, best_step }) => new Map(samples
    .filter(({ step }) => step === (best_step ?? step)).map(({ prompt, text }) => [prompt, text])));
  const shared = [...texts[0].keys()].filter((prompt) => texts.every((each) => each.has(prompt)));
  const advice = "Choose one with python report.py … --prompt TEXT.";
  if (!shared.length) $("samples").append(make("p", {}, `The runs have no prompt in common. ${advice}`));
  for (const prompt of shared) {
    const columns = runs.map(({ name }, i) =>
      make("div", {}, make("h3", {}, name), makeSample([make("b", {}, prompt), texts[i].get(prompt)])));
    $("samples").append(make("div", { class: "beside" }, ...columns));
  }
}

function showDifferences(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings)));
  for (const name of ["out", "resume", "wandb"]) names.delete(name);
  const rows = [...names].map((name) => [name, ...runs.map((run) => formatSetting(run.settings[name]))]);
  rows.push(["commit of the code", ...runs.map((run) => run.about.machine?.commit ?? "not recorded")]);
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  $("h-settings").textContent = "Settings that differ";
  const head = ["setting", ...runs.map((run) => run.name)];
  $("settings").append(differing.length ? makeTable(head, differing) : make("p", {}, "None."));
}

function showComparison(runs) {
  $("comparison").hidden = false;
  const [kind, text] = winner;
  $("comparison").append(make("p", { class: `verdict ${kind}`, id: "winner" }, text), makeResultTable(runs));
  for (const id of ["first", "attention", "data-used", "machine"]) $(id).hidden = true;
  showSamplesBeside(runs);
  showDifferences(runs);
}
