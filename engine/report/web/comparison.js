/** Several runs: their table, which is better, their texts side by side, and the settings that differ; and all runs. */

const COLUMNS = [
  ["bits per byte", (run) => run.best?.val_bits_per_byte, formatLoss],
  ["loss, nats per token", (run) => run.best?.val_loss, formatLoss],
  ["perplexity", (run) => run.best?.val_perplexity, formatAmount],
  ["score, %", (run) => run.best?.val_score, (value) => (100 * value).toFixed(1)],
  ["at step", (run) => run.best?.step, formatCount],
  ["parameters", (run) => run.about?.parameters, formatCount],
  ["tokens", (run) => run.num_tokens, formatCount],
  ["time", (run) => run.state?.seconds, formatSeconds],
  ["state", ({ state, problem }) => (problem ? `damaged: ${problem}` : state?.state), String],
  ["data", ({ settings }) => settings && [settings.data].flat().join(" "), String],
  ["machine", ({ about }) => about?.machine?.GPU ?? about?.machine?.processor, String],
  ["commit", ({ about }) => about?.machine?.commit, String],
];

const isKnown = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const compareValues = (a, b) => typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;

/** Makes a table with a row for each run, sorted by the column whose heading is clicked; again, in reverse. */
function makeRunTable(runs, sortedBy, makeName = (run) => run.name) {
  const columns = [["run", ({ name }) => name, (name, run) => makeName(run)],
    ...COLUMNS.filter(([, read]) => runs.some((run) => isKnown(read(run))))];
  const buttons = columns.map(([title], i) => makeButton(title, () => sort(i)));
  const box = makeTable(buttons, [], "Runs, scrolls sideways");
  const format = (run) => columns.map(([, read, show]) => isKnown(read(run)) ? show(read(run), run) : "–");
  const rows = new Map(runs.map((run) => [run, makeRows([format(run)])[0]]));
  const sort = (column) => {
    const { parentNode: heading } = buttons[column];
    const isReversed = heading.ariaSort === "ascending";
    const known = runs.filter((run) => isKnown(columns[column][1](run)));
    known.sort((a, b) => (isReversed ? -1 : 1) * compareValues(columns[column][1](a), columns[column][1](b)));
    for (const button of buttons) button.parentNode.removeAttribute("aria-sort");
    heading.ariaSort = isReversed ? "descending" : "ascending";
    box.querySelector("tbody").replaceChildren(...new Set([...known, ...runs].map((run) => rows.get(run))));
  };
  box.firstChild.id = "results";
  sort(Math.min(sortedBy, columns.length - 1));
  return box;
}

/** Shows what the used checkpoints wrote after prompts that all runs have. */
function showSamplesBeside(runs) {
  const texts = runs.map(({ samples, best_step }) => new Map(samples
    .filter(({ step }) => step === (best_step ?? step)).map(({ prompt, text }) => [prompt, text])));
  const shared = [...texts[0].keys()].filter((prompt) => texts.every((each) => each.has(prompt)));
  if (!shared.length) $("samples").append(make("p", {}, "The runs have no prompt in common."));
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
  const [kind, text] = winner ?? ["", "Runs that have the same text are comparable by bits per byte."];
  $("comparison").append(make("p", { class: `verdict ${kind}`, id: "winner" }, text), makeRunTable(runs, 1),
    makeNote("With different tokenizers, only bits per byte are comparable."));
  for (const id of ["first", "attention", "data-used", "machine"]) $(id).hidden = true;
  showSamplesBeside(runs);
  showDifferences(runs);
}

const makeAddress = (name) => `${name.split("/").map(encodeURIComponent).join("/")}/report.html`;
const readMarked = () => new URLSearchParams(location.hash.slice(1)).getAll("run");

const makeMark = (run) => run.problem ? ""
  : make("input", { type: "checkbox", value: run.name, "aria-label": `mark ${run.name}` });

/** The page of all runs: a table to sort. Marked runs are compared, and named by the address. */
function showList(runs) {
  document.title = "Runs";
  $("title").textContent = formatNoun(runs.length, "run");
  for (const each of document.querySelectorAll("main > section, #first")) each.hidden = each.id !== "list";
  const box = makeRunTable(runs, 0, (run) => [makeMark(run), make("a", { href: makeAddress(run.name) }, run.name)]);
  $("list").append(box);
  on("compare", "click", () => {
    const marked = [...box.querySelectorAll("tbody input:checked")].map(({ value }) => ["run", value]);
    if (marked.length > 1) location.hash = new URLSearchParams(marked);
    else $("compare-status").textContent = "Mark two runs or more.";
  });
}
