/** Curves of runs: charts with one horizontal axis, one cursor and one zoom. */

const CHARTS = [
  { title: "Loss", unit: "nats per token", train: "train_loss", val: "val_loss", hasLog: true,
    ifEmpty: "No records yet, or none is finite." },
  { title: "Bits per byte, validation", unit: "bits per UTF-8 byte", val: "val_bits_per_byte", hasLog: true,
    ifEmpty: "No evaluation yet, or none is finite." },
  { title: "Score, validation", unit: "fraction of right answers", val: "val_score" },
  { title: "Learning rate", unit: "learning rate", train: "learning_rate", hasZero: true },
  { title: "Gradient norm", unit: "norm before clipping", train: "grad_norm", hasZero: true, hasLog: true },
  { title: "Throughput", unit: "tokens per second", train: "tokens_per_second", hasZero: true },
];
const AXES = { step: "steps", tokens: "tokens", seconds: "time" };
const TIME_UNITS = { 1: "seconds", 60: "minutes", 3600: "hours" };
const DASHES = [undefined, [8, 4], [2, 3]];
const MAX_MARKED_POINTS = 60;
const MIN_SMOOTHED_POINTS = 20;
const LABEL_HEIGHT = 16;
const LABEL_FONT = "12px system-ui, sans-serif";
const formatBaseline = ([name, value]) => `${name} ${value.toFixed(3)}`;
const findNearest = (xs, x) => xs.reduce((at, value, i) => (Math.abs(value - x) < Math.abs(xs[at] - x) ? i : at), 0);
const INCREMENTS = Array.from({ length: 51 }, (_, i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 4));

/** Averages exponentially, over about the last twentieth of the points so far, from the first point on. */
function smoothValues(values) {
  let average = null;
  return values.map((value, i) => {
    if (value !== null) average = (average ?? value) + (value - (average ?? value)) / (1 + i / MIN_SMOOTHED_POINTS);
    return value === null ? null : average;
  });
}

/** Makes the line of a curve, if it has a value, with its tracks: the edges of a band, its values, their average. */
function makeLine({ isSingle, state }, source, key, look) {
  const x = source[state.axis];
  const { mean = [], min, max } = source[key] ?? {};
  if (!x || x.includes(null) || mean.every((value) => value === null)) return [];
  const line = { ...look, source, key, x, mean };
  const average = key === "train_loss" && mean.length >= MIN_SMOOTHED_POINTS && smoothValues(mean);
  if (isSingle) Object.assign(line, { low: min, high: max, smoothed: average });
  else if (average) Object.assign(line, { mean: average, label: `${look.label} (smoothed)` });
  const tracks = [{ values: line.low, isEdge: true }, { values: line.high, isEdge: true, isHigh: true },
    { values: line.mean, width: look.width, isPale: Boolean(line.smoothed) }, { values: line.smoothed, width: 2 }];
  const skip = (value) => (state.isLog && look.chart.hasLog && value <= 0 ? null : value);
  line.tracks = tracks.filter(({ values }) => values)
    .map(({ values, ...track }) => ({ ...track, line, values: values.map(skip) }));
  return [line];
}

/** Makes a chart's lines of every run, also those that are hidden. */
function makeLines(view, chart) {
  const { isSingle, runs, state } = view;
  return runs.flatMap((run, index) => {
    const { training, validation } = run;
    const xs = training[state.axis] ?? [];
    const start = xs.length < MIN_SMOOTHED_POINTS ? -Infinity : xs[0] + (xs.at(-1) - xs[0]) / 20;
    const keys = Object.keys(validation).filter((key) => isSingle && key.startsWith(`${chart.val}/`));
    const curves = [
      [training, chart.train, "training", { width: chart.val ? 1 : 1.5, hue: index }],
      [validation, chart.val, "validation", { width: 2.5, hue: isSingle ? 1 : index }],
      ...keys.map((key, i) => [validation, key, `validation on ${key.slice(key.indexOf("/") + 1)}`,
        { width: 1.5, hue: 2 + i, dash: [4, 4] }]),
    ].filter(([, key]) => key);
    return curves.flatMap(([source, key, name, { hue, ...look }]) => makeLine(view, source, key, {
      chart, run, index, start, color: `--c${hue % 7}`, dash: DASHES[Math.floor(index / 7) % 3], ...look,
      isValidation: source === validation, label: isSingle ? name : `${run.name}, ${name}`,
      group: isSingle ? curves.length > 1 && name : `run ${index}`,
    }));
  });
}

/** Returns a curve's values in an interval, with those at its ends, which may lie between two points. */
function findValues(xs, values, from, to) {
  const inside = values.filter((value, i) => value !== null && xs[i] >= from && xs[i] <= to);
  const ends = [from, to].flatMap((x) => {
    const i = xs.findIndex((point) => point >= x);
    if (i < 1 || values[i] === null || values[i - 1] === null) return [];
    return values[i - 1] + (values[i] - values[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]);
  });
  return [...inside, ...ends];
}

/** Returns the points of the step whose checkpoint is used. */
function findBestPoints({ chart, lines }) {
  return lines.filter(({ key, run }) => key === chart.val && typeof run.best_step === "number").map((line) => {
    const i = findNearest(line.source.step, line.run.best_step);
    return { line, x: line.x[i], value: line.mean[i], step: line.run.best_step };
  }).filter(({ value }) => value !== null);
}

/** Returns the horizontal range: all that the runs planned, in proportion to their steps. */
function findBounds({ runs, state }) {
  const ends = runs.map(({ training, validation, status }) => {
    const last = training[state.axis]?.at(-1) ?? 0;
    const planned = last * (status?.total_steps ?? 0) / (training.step?.at(-1) ?? 1);
    return Math.max(last, planned, validation[state.axis]?.at(-1) ?? 0);
  });
  return { min: 0, max: Math.max(...ends) || 1 };
}

/** Fits the vertical range to what is visible. The first steps, which fall from ln V, would flatten the rest. */
function fitRange(plot) {
  const { view, chart, lines, baselines } = plot;
  const { min, max } = view.range;
  const [transform, invert] = plot.isLog ? [Math.log, Math.exp] : [Number, Number];
  const isWhole = view.state.zoom || chart.hasZero;
  const isFitted = ([name]) => !lines.length || (name === "bigram" && !view.state.zoom);
  const values = baselines.filter(isFitted).map(([, value]) => value);
  const spread = [];
  for (const line of lines) {
    const from = isWhole ? min : Math.max(min, Math.min(line.start, line.x.at(-1)));
    const visible = line.tracks.map(({ values }) => findValues(line.x, values, from, max));
    values.push(...visible.at(-1));
    spread.push(...visible.flat());
  }
  const all = plot.allLines.flatMap(({ tracks }) => tracks.flatMap((track) => track.values));
  if (!values.length) values.push(...all.filter((value) => value !== null));
  const hasZero = chart.hasZero && !plot.isLog;
  const low = Math.min(...values.map(transform), hasZero ? 0 : Infinity);
  const high = Math.max(...values.map(transform));
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  const headroom = baselines.length ? 2 * room : room; // for the names of baselines
  const lowest = Math.max(Math.min(...spread.map(transform), low), low - 6 * room) - room;
  const highest = Math.min(Math.max(...spread.map(transform), high), high + 6 * room) + headroom;
  plot.range = { min: invert(hasZero ? low : lowest), max: invert(highest) };
  describeMarks(plot);
}

/** Sorts the baselines by their place, and describes for screen readers what is drawn beside the lines. */
function describeMarks(plot) {
  const { min, max } = plot.range;
  plot.marks = { inside: [], above: [], below: [] };
  for (const baseline of plot.baselines) {
    plot.marks[baseline[1] > max ? "above" : baseline[1] < min ? "below" : "inside"].push(baseline);
  }
  const best = findBestPoints(plot).map(({ line, value, step }) =>
    `${line.label}, best: ${formatAmount(value)} at step ${formatCount(step)}`);
  const texts = Object.entries(plot.marks).map(([place, baselines]) =>
    baselines.length && `baselines ${place} the chart: ${baselines.map(formatBaseline).join(", ")}`);
  plot.stage.setAttribute("aria-description",
    [plot.isLog && "logarithmic axis", ...best, ...texts].filter(Boolean).join("; "));
}

/** Draws a label on a ground of its own, where it covers fewest lines and, before that, nothing beside them. */
function drawLabel({ u, lines }, taken, { text, listLefts, tops }) {
  const { ctx, over } = u;
  const [width, height] = [ctx.measureText(text).width + 6, LABEL_HEIGHT];
  const countOverlaps = ({ left, top }) => {
    const [from, to] = [left - 3, left + width + 3].map((x) => u.posToVal(x, "x"));
    const crossed = lines.flatMap(({ tracks }) => tracks).filter(({ line, values }) => {
      const heights = findValues(line.x, values, from, to).map((value) => u.valToPos(value, "y"));
      return Math.min(...heights) < top + height + 2 && Math.max(...heights) > top - 2;
    });
    const covered = taken.filter((box) => box.left < left + width && left < box.left + box.width &&
      box.top < top + height && top < box.top + box.height);
    return crossed.length + 10 * covered.length;
  };
  const boxes = tops.flatMap((top) => listLefts(width).map((left) => ({ width, height,
    left: clamp(left, 0, over.clientWidth - width), top: clamp(top, 0, over.clientHeight - height) })));
  const counts = boxes.map(countOverlaps);
  const box = boxes[counts.indexOf(Math.min(...counts))];
  ctx.fillStyle = css("--panel");
  ctx.fillRect(box.left, box.top, width, height);
  ctx.fillStyle = css("--text");
  ctx.fillText(text, box.left + 3, box.top + 12);
  taken.push(box);
}

/** Draws baselines, a ring at each best point and, for a single run, their names. */
function drawMarks(plot) {
  const { u, view, marks: { inside, above, below } } = plot;
  const { ctx, bbox, over: { clientWidth, clientHeight } } = u;
  const listLefts = (width) => Array.from({ length: 13 }, (_, i) => (clientWidth - width) * (1 - i / 12));
  const join = (baselines) => baselines.map(formatBaseline).join(" · ");
  const taken = [];
  const labels = [];
  ctx.save();
  ctx.translate(bbox.left, bbox.top);
  ctx.scale(devicePixelRatio, devicePixelRatio);
  Object.assign(ctx, { font: LABEL_FONT, textAlign: "left", textBaseline: "alphabetic", lineWidth: 2 });
  for (const { line, x, value } of findBestPoints(plot)) {
    const [left, top] = [u.valToPos(x, "x"), u.valToPos(value, "y")];
    if (left < 0 || left > clientWidth || top < 0 || top > clientHeight) continue;
    ctx.strokeStyle = css(line.color);
    ctx.stroke(new Path2D(`M${left + 8} ${top}a8 8 0 1 0 -16 0a8 8 0 1 0 16 0`));
    taken.push({ left: left - 8, top: top - 8, width: 16, height: 16 });
    const tops = [-26, 10, -42, 26, 2, -58, -74].map((down) => top + down);
    const listLefts = (width) => [left - width - 14, left + 4, left - width / 2];
    if (view.isSingle) labels.push({ text: `best ${formatAmount(value)}`, listLefts, tops });
  }
  Object.assign(ctx, { strokeStyle: css("--muted"), lineWidth: 1 });
  ctx.setLineDash([3, 3]);
  for (const baseline of inside) {
    const top = Math.round(u.valToPos(baseline[1], "y"));
    ctx.stroke(new Path2D(`M0 ${top + 0.5}h${clientWidth}`));
    taken.push({ left: 0, width: clientWidth, top: top - 1, height: 2 });
    labels.push({ text: formatBaseline(baseline), listLefts, tops: [top - LABEL_HEIGHT - 2, top + 3] });
  }
  if (above.length) labels.push({ text: `↑ ${join(above)}`, listLefts, tops: [1, 20] });
  const bottom = clientHeight - LABEL_HEIGHT - 1;
  if (below.length) labels.push({ text: `↓ ${join(below)}`, listLefts, tops: [bottom, bottom - 19] });
  for (const label of labels) drawLabel(plot, taken, label);
  ctx.restore();
}

/** Formats the ticks of an axis with the same number of decimals. */
function formatTicks(values, step) {
  const decimals = (String(Number(step.toPrecision(6))).split(".")[1] ?? "").length;
  return values.map((value) => (decimals && value ? value.toFixed(decimals) : formatAmount(value)));
}

/** Lists the ticks of a logarithmic axis, which are equally far apart within a power of ten. */
function listLogTicks(min, max) {
  if (max > 10 * min) return INCREMENTS.filter((tick) => tick >= min && tick <= max);
  const step = INCREMENTS.find((increment) => (max - min) / increment <= 7) ?? max;
  return Array.from({ length: 9 }, (_, i) => (Math.ceil(min / step) + i) * step).filter((tick) => tick <= max);
}

function makeAxes({ view: { bounds, state: { axis } }, chart, isLog }) {
  const isTime = axis === "seconds";
  const unit = !isTime || bounds.max <= 180 ? 1 : bounds.max <= 10800 ? 60 : 3600;
  const label = { step: "optimizer steps", tokens: "tokens", seconds: `time (${TIME_UNITS[unit]})` }[axis];
  const line = { stroke: () => css("--line"), width: 1 };
  const text = { stroke: () => css("--text"), font: LABEL_FONT, labelFont: LABEL_FONT, labelSize: 18 };
  const format = (unit) => (u, values, index, space, step) =>
    formatTicks(values.map((value) => value / unit), step / unit);
  const log = { splits: (u, index, min, max) => listLogTicks(min, max), filter: (u, values) => values,
    values: (u, values) => values.map((value) => formatAmount(value)) };
  const incrs = INCREMENTS.filter((step) => isTime || step >= 1).map((step) => step * unit);
  return [
    { ...text, grid: line, ticks: line, label, size: 34, space: 70, incrs, values: format(unit) },
    { ...text, grid: line, ticks: line, label: chart.unit, size: 62, ...(isLog ? log : { values: format(1) }) },
  ];
}

/** Makes the options of uPlot, whose cursor is where the state of the view says. */
function makeOptions(view, plot, tracks) {
  const series = tracks.map(({ line, width, isEdge, isPale }) => {
    const stroke = isEdge ? undefined : () => css(line.color);
    const show = !isEdge && (line.x.length === 1 || (line.isValidation && line.x.length <= MAX_MARKED_POINTS));
    const points = { show, size: 7, fill: stroke, stroke };
    return { stroke, width: isEdge ? 0 : width, alpha: isPale ? 0.4 : 1, dash: line.dash, points };
  });
  const bands = tracks.flatMap(({ line, isHigh }, i) =>
    (isHigh ? [{ series: [i + 1, i], fill: () => `${css(line.color)}30` }] : []));
  const cursor = { y: false, move: () => [plot.left, 0], dataIdx: (u, i, index) => index,
    drag: { setScale: false, dist: 5 }, bind: { dblclick: () => () => setZoom(view, null) },
    points: { size: (u, i) => (tracks[i - 1].isEdge ? 0 : 9), width: 1, stroke: () => css("--panel") } };
  const zoom = ({ select: { left, width } }) => {
    setZoom(view, { min: plot.u.posToVal(left, "x"), max: plot.u.posToVal(left + width, "x") });
    plot.u.setSelect({ width: 0 }, false);
  };
  return {
    width: plot.stage.clientWidth, height: plot.chart === view.charts[0] ? 340 : 220, padding: [10, 24, 0, 0],
    series: [{}, ...series], bands, axes: makeAxes(plot), legend: { show: false }, cursor,
    scales: {
      x: { time: false, auto: false, range: () => [view.range.min, view.range.max] },
      y: { auto: false, distr: plot.isLog ? 3 : 1, range: () => [plot.range.min, plot.range.max] },
    },
    hooks: { init: [(u) => { plot.u = u; }], draw: [() => drawMarks(plot), () => showCursor(plot)], setSelect: [zoom] },
  };
}

function formatPlace(x, axis) {
  if (axis === "seconds") return x < 100 ? `${formatAmount(x)} s` : formatSeconds(x);
  return axis === "step" ? `step ${formatCount(x)}` : `${formatCount(x)} tokens`;
}

/** Describes a line's point that is nearest to x, with its place if that is another. */
function describePoint(line, x, axis) {
  const i = findNearest(line.x, x);
  const smoothed = line.smoothed ? `, smoothed ${formatAmount(line.smoothed[i])}` : "";
  const band = line.low ? `, from ${formatAmount(line.low[i])} to ${formatAmount(line.high[i])}` : "";
  const place = line.x[i] === x ? "" : ` at ${formatPlace(line.x[i], axis)}`;
  return `${line.label} ${formatAmount(line.mean[i])}${smoothed}${band}${place}`;
}

/** Puts a plot's cursor on the point that is nearest to that of the view, and writes its values below the chart. */
function showCursor(plot) {
  const { view, u, xs, lines, stage } = plot;
  const { cursor, axis } = view.state;
  plot.at = cursor === null ? -1 : findNearest(xs, cursor);
  const x = xs.at(plot.at);  // without a cursor the last one, which is read but not marked
  const isInside = x >= view.range.min && x <= view.range.max;
  const isShown = isInside && cursor !== null;
  plot.left = isShown ? u.valToPos(x, "x") : -10;
  u.cursor.idxs.fill(null);  // or uPlot leaves the dots where they were before a change of size
  u.setCursor({ left: plot.left, top: 0 });
  const points = lines.map((line) => describePoint(line, x, axis)).join("; ");
  plot.readout.textContent = isInside ? `${formatPlace(x, axis)}: ${points || "all lines are hidden"}` : "";
  stage.setAttribute("aria-valuetext", isShown ? plot.readout.textContent : "no point is selected");
  if (isShown) stage.setAttribute("aria-valuenow", x);
}

function moveCursor(view, x) {
  view.state.cursor = x;
  view.plots.forEach(showCursor);
}

/** Shows a horizontal range in all charts; null shows everything. */
function setZoom(view, zoom) {
  const { bounds, state } = view;
  const min = Math.max(bounds.min, zoom?.min ?? bounds.min);
  const max = Math.min(bounds.max, zoom?.max ?? bounds.max);
  if (max - min < (bounds.max - bounds.min) / 1e4) return;
  state.zoom = min === bounds.min && max === bounds.max ? null : { min, max };
  view.reset.hidden = !state.zoom;
  for (const plot of view.plots) {
    fitRange(plot);
    plot.u.setScale("x", view.range);
    plot.u.setScale("y", plot.range);
  }
}

/** Moves the cursor by arrows, Home and End; zooms around it by + and −; shows everything by 0. */
function handleKey(plot, event) {
  const { view, xs, at } = plot;
  const { min, max } = view.range;
  const count = event.shiftKey ? 10 : 1;
  const targets = { ArrowRight: at + count, ArrowLeft: at - count, Home: 0, End: xs.length - 1 };
  const zooms = { "+": 0.25, "=": 0.25, "-": 1, "0": Infinity };
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in { ...targets, ...zooms })) return;
  event.preventDefault();
  if (event.key in zooms) {
    const center = xs[at] >= min && xs[at] <= max ? xs[at] : (min + max) / 2;
    const half = (max - min) * zooms[event.key];
    return void setZoom(view, { min: center - half, max: center + half });
  }
  const x = xs[clamp(targets[event.key], 0, xs.length - 1)];
  const from = clamp(x - (max - min) / 2, view.bounds.min, view.bounds.max - (max - min));
  if (x < min || x > max) setZoom(view, { min: from, max: from + max - min });
  moveCursor(view, x);
}

/** Moves the cursor to the visible point that is nearest to a mouse or a finger. */
function handlePointer({ view, u, xs }, event) {
  const { min, max } = view.range;
  const visible = xs.filter((x) => x >= min && x <= max);
  const x = u.posToVal(event.clientX - u.over.getBoundingClientRect().left, "x");
  moveCursor(view, visible[findNearest(visible, x)] ?? null);
  if (event.type === "pointerdown") u.over.setPointerCapture(event.pointerId);  // a drag may end outside
}

function addPlot(view, chart, heading, allLines) {
  const { bounds, state: { hidden, isLog } } = view;
  const lines = allLines.filter(({ group }) => !hidden.has(group));
  const tracks = lines.flatMap((line) => line.tracks);
  const baselines = chart.val === "val_loss" && !hidden.has("baselines") ? view.baselines : [];
  const plot = { view, chart, allLines, lines, baselines, at: -1, left: -10, isLog: isLog && chart.hasLog };
  plot.stage = make("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": `${chart.title}, ${chart.unit}`,
    "aria-valuemin": bounds.min, "aria-valuemax": bounds.max, "aria-valuenow": bounds.min,
    keydown: (event) => handleKey(plot, event) });
  plot.readout = make("output", { class: "readout", "aria-live": "off" });
  plot.readout.style.setProperty("--rows", Math.ceil(view.runs.length / 2));
  plot.xs = [...new Set((lines.length ? lines : allLines).flatMap(({ x }) => x))].sort((a, b) => a - b);
  $("charts").append(make("figure", {}, heading, plot.stage, plot.readout));
  fitRange(plot);
  const data = uPlot.join([[plot.xs], ...tracks.map(({ line, values }) => [line.x, values])]);
  plot.u = new uPlot(makeOptions(view, plot, tracks), data, plot.stage);
  const { over } = plot.u;
  for (const type of ["pointerdown", "pointermove"]) over.addEventListener(type, (event) => handlePointer(plot, event));
  over.addEventListener("pointerleave", ({ pointerType }) => pointerType === "touch" || moveCursor(view, null));
  view.plots.push(plot);
}

function drawCharts(view, changes = {}) {
  Object.assign(view.state, changes);
  for (const { u } of view.plots.splice(0)) u.destroy();
  $("charts").replaceChildren();
  view.bounds = findBounds(view);
  view.reset.hidden = !view.state.zoom;
  for (const chart of view.charts) {
    const lines = makeLines(view, chart);
    const heading = make("figcaption", {}, make("h3", {}, chart.title));
    if (lines.length) addPlot(view, chart, heading, lines);
    else if (chart.ifEmpty) $("charts").append(make("figure", {}, heading, makeNote(chart.ifEmpty)));
  }
}

/** Makes a CSV file of the points shown: a row for each step of each run. */
function makeCsv(view) {
  const rows = new Map();
  const lines = view.plots.flatMap((plot) => plot.lines);
  for (const { x, run, index, source, key } of lines) {
    x.forEach((at, i) => {
      if (at < view.range.min || at > view.range.max) return;
      const axes = Object.fromEntries(Object.keys(AXES).map((axis) => [axis, source[axis]?.[i]]));
      const id = `${index} ${axes.step}`;
      rows.set(id, { index, run: run.name, ...axes, ...rows.get(id), [key]: source[key].mean[i] });
    });
  }
  const keys = [...new Set(lines.map(({ key }) => key))].sort((a, b) => a.startsWith("val") - b.startsWith("val"));
  const columns = ["run", ...Object.keys(AXES), ...keys];
  const sorted = [...rows.values()].sort((a, b) => a.index - b.index || a.step - b.step);
  const quote = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value ?? "");
  const cells = [columns, ...sorted.map((row) => columns.map((column) => row[column]))];
  return cells.map((row) => `${row.map(quote).join(",")}\n`).join("");
}

function downloadCsv(view) {
  const url = URL.createObjectURL(new Blob([makeCsv(view)], { type: "text/csv" }));
  make("a", { href: url, download: `${view.runs.map(({ name }) => name).join("-")}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

function addControls(view) {
  const { state, runs } = view;
  const makeInput = (text, attributes) => make("label", {}, make("input", attributes), ` ${text}`);
  const axes = Object.keys(AXES).filter((axis) => runs.some(({ training }) => training[axis]?.length));
  const radios = axes.map((axis) => makeInput(AXES[axis], { type: "radio", name: "axis", checked: axis === state.axis,
    change: () => drawCharts(view, { axis, zoom: null, cursor: null }) }));
  const log = makeInput("vertical log axis", { type: "checkbox", checked: state.isLog,
    change: ({ target }) => drawCharts(view, { isLog: target.checked }) });
  view.reset = makeButton("Reset zoom", () => {
    setZoom(view, null);
    view.plots[0].stage.focus();
  });
  $("axis").append(...radios, log, view.reset, makeButton("Values as CSV", () => downloadCsv(view)));
  $("axis").hidden = !axes.length;
}

/** Adds a button for each line of a single run, or for each of several runs, that hides it. */
function addSwitches(view) {
  const { isSingle, baselines, state: { hidden } } = view;
  const lines = view.charts.flatMap((chart) => makeLines(view, chart)).filter(({ group }) => group);
  const groups = new Map(lines.map((line) => [line.group, line]));
  if (baselines.length) groups.set("baselines", { color: "--muted", dash: [3, 3] });
  for (const [group, { color, dash, run }] of groups) {
    const style = { borderColor: `var(${color})`, borderTopStyle: dash ? "dashed" : "solid" };
    const button = makeButton([make("span", { class: "key", style }), isSingle ? group : run.name], () => {
      if (!hidden.delete(group)) hidden.add(group);
      button.setAttribute("aria-pressed", !hidden.has(group));
      drawCharts(view);
    }, { "aria-pressed": !hidden.has(group) });
    $("shown").append(button);
  }
  $("shown").hidden = !groups.size;
}

/** Shows the curves of runs. Returns a function that returns the state, for a later call to restore. */
function showCurves(runs, { saved = {}, bitsFirst = false } = {}) {
  const state = { axis: "step", isLog: false, zoom: null, cursor: null, ...saved, hidden: new Set(saved.hidden) };
  const charts = bitsFirst ? [CHARTS[1], CHARTS[0], ...CHARTS.slice(2)] : CHARTS;
  const isSingle = runs.length === 1;
  const baselines = isSingle ? Object.entries(runs[0].baselines).sort((a, b) => a[1] - b[1]) : [];
  const view = { runs, isSingle, baselines, state, charts, plots: [],
    get range() { return state.zoom ?? this.bounds; } };
  addControls(view);
  addSwitches(view);
  drawCharts(view);
  $("how").hidden = !view.plots.length;
  dark.addEventListener("change", () => view.plots.forEach(({ u }) => u.redraw()));
  new ResizeObserver(() => {
    for (const { u, stage } of view.plots) u.setSize({ width: stage.clientWidth, height: u.height });
  }).observe($("charts"));
  return () => ({ ...state, hidden: [...state.hidden] });
}
