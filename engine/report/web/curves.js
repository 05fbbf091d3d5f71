/** Curves of runs: charts by uPlot with one horizontal axis, one cursor and one zoom. */

const CHARTS = [
  { title: "Loss", unit: "nats per token", train: "train_loss", val: "val_loss" },
  { title: "Bits per byte, validation", unit: "bits per UTF-8 byte", val: "val_bits_per_byte" },
  { title: "Score, validation", unit: "fraction of right answers", val: "val_score" },
  { title: "Learning rate", unit: "learning rate", train: "learning_rate", hasZero: true },
  { title: "Gradient norm", unit: "norm before clipping", train: "grad_norm", hasZero: true },
  { title: "Throughput", unit: "tokens per second", train: "tokens_per_second", hasZero: true },
];
const AXES = { step: ["steps", 1], tokens: ["tokens", 1], seconds: ["minutes", 60] };  // title, unit
const DASHES = [undefined, [8, 4], [2, 3]];
const MAX_MARKED_POINTS = 60;
const MIN_SMOOTHED_POINTS = 20;
const CHART_FONT = "12px system-ui, sans-serif";
const SYNC_KEY = "charts";

/** Averages exponentially, over about the last twentieth of the points so far, from the first point on. */
function smoothValues(values) {
  let average = null;
  return values.map((value, i) => {
    if (value !== null) average = (average ?? value) + (value - (average ?? value)) / (1 + i / MIN_SMOOTHED_POINTS);
    return value === null ? null : average;
  });
}

/** Makes the series of a curve, if it has a value: its values and their average; of several runs one of them. */
function makeSeries({ isSingle, state }, source, key, { label, width, ...look }) {
  const x = source[state.axis];
  const values = source[key] ?? [];
  if (!x || x.includes(null) || values.every((value) => value === null)) return [];
  const average = key === "train_loss" && values.length >= MIN_SMOOTHED_POINTS && smoothValues(values);
  const isMarked = x.length === 1 || (key.startsWith("val") && x.length <= MAX_MARKED_POINTS);
  const stroke = () => css(look.color);
  const points = { show: isMarked, size: 7, fill: stroke };
  const line = { x, values, label, width, stroke, isFitted: true, points, ...look };
  const smoothed = { ...line, values: average, label: `${label}, average`, width: 2 };
  if (!average) return [line];
  return isSingle ? [{ ...line, alpha: 0.4, isFitted: false }, smoothed] : [smoothed];
}

/** Makes a chart's series of every run. */
function listSeries(view, chart) {
  const { isSingle, runs, state, baselines } = view;
  const all = runs.flatMap((run, index) => {
    const keys = Object.keys(run.validation).filter((key) => isSingle && key.startsWith(`${chart.val}/`));
    const curves = [
      [run.training, chart.train, "training", { width: chart.val ? 1 : 1.5, hue: index }],
      [run.validation, chart.val, "validation", { width: 2.5, hue: isSingle ? 1 : index }],
      ...keys.map((key, i) => [run.validation, key, `validation on ${key.slice(key.indexOf("/") + 1)}`,
        { width: 1.5, hue: 2 + i, dash: [4, 4] }]),
    ].filter(([, key]) => key);
    const series = curves.flatMap(([source, key, name, { hue, ...look }]) => makeSeries(view, source, key, {
      color: `--c${hue % 7}`, dash: DASHES[Math.floor(index / 7) % 3], ...look,
      label: isSingle ? name : `${run.name}, ${name}`, group: isSingle ? name : `run ${index}` }));
    const at = run.validation.step?.indexOf(run.best_step);
    const best = isSingle && run.validation[chart.val]?.[at];
    return [...series, ...best ? [makeRing(run.validation[state.axis][at], best, series.at(-1))] : []];
  });
  const ends = [0, findEnd(view)];
  const lines = chart.train === "train_loss" && all.length ? baselines : [];
  return [...all, ...lines.map(([label, value]) => ({ x: ends, values: [value, value], label, group: label, width: 1,
    dash: [3, 3], stroke: () => css("--muted"), points: { show: false }, isFitted: label === "bigram" }))];
}

/** Makes the ring around the point whose checkpoint is used. */
const makeRing = (x, value, { group, stroke }) => ({ x: [x], values: [value], label: "checkpoint used", group, stroke,
  points: { show: true, size: 15, width: 2, fill: "transparent" } });

/** Returns the end of the horizontal axis: all that the runs planned, in proportion to their steps. */
function findEnd({ runs, state }) {
  const ends = runs.map(({ training, validation, state: status }) => {
    const last = training[state.axis]?.at(-1) ?? 0;
    const planned = last * (status?.state === "done" ? 0 : status?.total_steps ?? 0) / (training.step?.at(-1) ?? 1);
    return Math.max(last, planned, validation[state.axis]?.at(-1) ?? 0);
  });
  return Math.max(...ends) || 1;
}

/** Fits the vertical range to what is visible. The first steps, which fall from ln V, would flatten the rest. */
function fitRange(u, { hasZero }) {
  const [first, last] = u.series[0].idxs;
  const [xs] = u.data;
  const isWhole = first === 0 && last === xs.length - 1;
  const isSteep = isWhole && !hasZero && xs.length > MIN_SMOOTHED_POINTS;
  const start = isSteep ? xs.findIndex((x) => x >= xs.at(-1) / 20) : first;
  const listValues = (isUsed) => u.series.flatMap((each, i) =>
    i && each.show && isUsed(each) ? u.data[i].slice(start, last + 1).filter(Number.isFinite) : []);
  const fitted = listValues(({ isFitted }) => isFitted);
  const values = fitted.length ? fitted : listValues(() => true);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (!values.length) return [1, 2];
  const room = (high - low) * 0.1 || Math.abs(high) * 0.1 || 1;
  return [hasZero ? Math.min(0, low) : low - room, high + room];
}

/** Returns the index of the value of a series that is nearest to an index. */
function findValue({ data: [xs, ...columns] }, series, at) {
  for (let distance = 0; distance < xs.length; distance++) {
    for (const i of [at - distance, at + distance]) if (Number.isFinite(columns[series - 1]?.[i])) return i;
  }
  return at;
}

/** Shows the last values, until the cursor points at others. */
function showLast(u) {
  const last = u.data[0].length - 1;
  if (u.cursor.idx === null) u.setLegend({ idxs: u.data.map((_, series) => findValue(u, series, last)) }, false);
}

/** Shows or hides the series of a group, in all charts. */
function toggleGroup({ plots, state: { hidden } }, { group }, { show }) {
  if (show === undefined) return;
  hidden[show ? "delete" : "add"](group);
  for (const plot of plots) {
    plot.series.forEach((each, i) => each.group === group && each.show !== show && plot.setSeries(i, { show }));
    for (const row of plot.root.querySelectorAll(".u-series button")) describeSwitch(row);
  }
}

const describeSwitch = (button) =>
  button.setAttribute("aria-pressed", !button.closest("tr").classList.contains("u-off"));

/** Lets keys move the cursor, and switch lines in the legend. */
function addKeys(u, stage) {
  stage.addEventListener("keydown", (event) => {
    const [, right] = event.target === stage ? readArrow(event) ?? [0, 0] : [0, 0];
    if (!right) return;
    const at = clamp((u.cursor.idx ?? u.data[0].length) + right, 0, u.data[0].length - 1);
    u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: 0 }, true, true);
  });
  for (const label of u.root.querySelectorAll(".u-series:not(:first-child) th")) {
    const button = make("button", { type: "button" }, ...label.childNodes);
    label.append(button);  // a click on it is one on the label, which uPlot handles
    describeSwitch(button);
  }
}

function makeAxes({ state: { axis } }, chart) {
  const look = { stroke: () => css("--text"), font: CHART_FONT, labelFont: CHART_FONT, labelSize: 18,
    grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line"), width: 1 } };
  const values = (u, ticks) => ticks.map((tick) => (tick === null ? "" : formatAmount(tick)));
  return [
    { ...look, label: AXES[axis][0], size: 34, space: 70, values },
    { ...look, label: chart.unit, size: 62, values },
  ];
}

/** Adds a chart to the page, with uPlot's legend, cursor and zoom. */
function addPlot(view, chart, series) {
  const { state } = view;
  const [title, unit] = AXES[state.axis];
  const stage = make("div", { class: "plot", tabindex: 0, role: "group",
    "aria-label": `${chart.title}, ${chart.unit}: arrow keys read its values` });
  $("charts").append(make("figure", {}, make("figcaption", {}, make("h3", {}, chart.title)), stage));
  const tables = series.map(({ x, values }) => [x.map((each) => each / unit), values]);
  const ends = [[0, findEnd(view) / unit]];
  const listed = series.map(({ x, values, group, ...each }) => ({ spanGaps: true, group, show: !state.hidden.has(group),
    value: (u, value) => (value === null || value === undefined ? "–" : formatAmount(value)), ...each }));
  const u = new uPlot({
    width: stage.clientWidth, height: chart === CHARTS[0] ? 340 : 220, padding: [10, 24, 0, 0],
    series: [{ label: title, value: (u, x) => x?.toLocaleString("en") ?? "–" }, ...listed],
    axes: makeAxes(view, chart), legend: { markers: { width: 3 } },
    cursor: { y: false, sync: { key: SYNC_KEY }, dataIdx: findValue,
      drag: { dist: 5 }, points: { size: 9 } },
    scales: {
      x: { time: false, range: (u, min, max) => [min, max] },
      y: { range: (u) => fitRange(u, chart) },
    },
    hooks: { ready: [showLast], setCursor: [showLast],
      setSeries: [(u, index, options) => index && toggleGroup(view, u.series[index], options)] },
  }, uPlot.join([ends, ...tables]), stage);
  view.plots.push(u);
  addKeys(u, stage);
}

function drawCharts(view, axis = view.state.axis) {
  view.state.axis = axis;
  for (const u of view.plots.splice(0)) u.destroy();
  $("charts").replaceChildren();
  for (const chart of CHARTS) {
    const series = listSeries(view, chart);
    if (series.length) addPlot(view, chart, series);
  }
  if (!view.plots.length) $("charts").append(makeNote("No records yet, or none is finite."));
}

function addControls(view) {
  const { state, runs } = view;
  const axes = Object.keys(AXES).filter((axis) => runs.some(({ training }) => training[axis]?.length));
  const radios = axes.map((axis) => make("label", {}, make("input", { type: "radio", name: "axis",
    checked: axis === state.axis, change: () => drawCharts(view, axis) }), ` ${AXES[axis][0]}`));
  $("axis").append(...radios);
}

function showCurves(runs) {
  const state = { axis: "step", hidden: new Set() };
  const isSingle = runs.length === 1;
  const baselines = isSingle ? Object.entries(runs[0].about.baselines ?? {}).sort((a, b) => a[1] - b[1]) : [];
  const view = { runs, isSingle, baselines, state, plots: [] };
  addControls(view);
  drawCharts(view);
  $("how").hidden = !view.plots.length;
  dark.addEventListener("change", () => drawCharts(view));
  new ResizeObserver(() => {
    for (const u of view.plots) u.setSize({ width: u.root.parentNode.clientWidth, height: u.height });
  }).observe($("charts"));
}
