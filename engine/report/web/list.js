/** The page of all runs: a table to sort and to filter. Marked runs are compared, and named by the address. */

const CURVE_PIXELS = [90, 22];
const LIST_COLUMNS = [
  ["run", ({ name }) => name, (name, run) => [makeMark(run), make("a", { href: makeAddress(name) }, name)]],
  ["state", ({ state, problem }) => problem ? `damaged: ${problem}` : state?.state],
  ["data", ({ settings }) => settings && [settings.data].flat().join(" ")],
  ["parameters", ({ about }) => about?.parameters, formatAmount],
  ["steps", ({ last_step }) => last_step, formatCount],
  ["loss", ({ best }) => best?.val_loss, (value) => value.toFixed(4)],
  ["bits per byte", ({ best }) => best?.val_bits_per_byte, (value) => value.toFixed(4)],
  ["minutes", ({ state }) => state && state.seconds / 60, (value) => value.toFixed(1)],
  ["machine", ({ about }) => about?.machine?.GPU ?? about?.machine?.processor],
  ["commit", ({ about }) => about?.machine?.commit],
  ["training loss", ({ training }) => training?.train_loss?.mean.findLast(isKnown), (value, run) => drawSmallCurve(run)],
];
const makeAddress = (name) => `${name.split("/").map(encodeURIComponent).join("/")}/report.html`;
const readMarked = () => location.hash.slice(1).split(",").filter(Boolean).map(decodeURIComponent);

const makeMark = (run) => run.problem ? "" : make("input", { type: "checkbox", value: run.name, "aria-label": `mark ${run.name}` });

/** Draws the training loss of a run without axes. */
function drawSmallCurve({ training: { train_loss: { mean } } }) {
  const canvas = make("canvas", { role: "img", "aria-label": "the training loss over the steps" });
  const values = mean.filter(isKnown);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [width, height] = CURVE_PIXELS;
  const context = prepareCanvas(canvas, width, height);
  const points = values.map((value, i) =>
    `${width * i / Math.max(1, values.length - 1)} ${2 + (height - 4) * (high - value) / (high - low || 1)}`);
  context.strokeStyle = css("--c0");
  context.stroke(new Path2D(`M${points.join("L")}`));
  return canvas;
}

function showList(runs) {
  document.title = "Runs";
  $("title").textContent = formatNoun(runs.length, "run");
  for (const each of document.querySelectorAll("main > section, #first")) each.hidden = each.id !== "list";
  const box = makeRunTable(runs, LIST_COLUMNS, 0);
  $("list").append(box);
  on("filter", "input", () => {
    const word = $("filter").value.toLowerCase();
    for (const row of box.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(word);
  });
  on("compare", "click", () => {
    const marked = [...box.querySelectorAll("tbody input:checked")].map(({ value }) => encodeURIComponent(value));
    if (marked.length > 1) location.hash = marked.join(",");
    else $("compare-status").textContent = "Mark two runs or more.";
  });
}
