/** The page of a run: its first screen, samples, attention and settings. */

const REFRESH_SECONDS = 10;
const MAX_SILENT_SECONDS = 600;  // of a run in training, before the page doubts it
const PLAY_SECONDS = 0.6;  // a step of training is shown
const MAX_SMALL_GRID_HEIGHT = 160;  // pixels, of the heads beside a sample
const { runs: all, winner, is_list: isList } = JSON.parse($("data").textContent);
const marked = isList ? all.filter(({ name }) => readMarked().includes(name)) : [];
const runs = marked.length > 1 ? marked : all;
const run = runs[0];
const stateKey = `report ${location.pathname}`;
const saved = readState(stateKey);  // what the reader chose; stored when the page is left
const formatSetting = (value) =>
  typeof value === "string" ? value : JSON.stringify(value ?? "not set").replaceAll('"', "");

/** Shows the state of the run; called every second of its training, in which screen readers do not read it out. */
function showState() {
  const { state } = run;
  const seconds = Math.max(0, Date.now() / 1000 - state.updated_at);
  const secondsLeft = Math.max(0, state.seconds_left - seconds);
  const left = state.seconds_left === null ? "" : `, ${formatSeconds(secondsLeft)} left`;
  const of = state.total_steps ? ` of ${formatCount(state.total_steps)}` : "";
  const texts = {
    training: `Training – ${Math.floor(100 * state.progress)}%${left} · updated ${formatSeconds(seconds)} ago`,
    silent: `No news for ${formatSeconds(seconds)}: was the run killed?`,
    done: `Done in ${formatSeconds(state.seconds)}, ${formatCount(state.step)} steps`,
    stopped: `Stopped at step ${formatCount(state.step)}${of}`,
  };
  const text = texts[state.state === "training" && seconds > MAX_SILENT_SECONDS ? "silent" : state.state];
  $("state").textContent = text;
  $("state").className = `state ${state.state}`;
  $("state").setAttribute("aria-live", state.state === "training" ? "off" : "polite");
}

function showHeadline() {
  const { best, settings } = run;
  const size = settings.vocab_size ? `, of ${formatCount(settings.vocab_size)} tokens` : "";
  const figures = best ? [
    [best.val_bits_per_byte.toFixed(3), "bits per byte"],
    [formatAmount(best.val_perplexity), `perplexity${size}`],
    [formatCount(best.step), "step of the checkpoint used"],
  ] : [["", "No evaluation yet."]];
  if (best?.val_score !== undefined) figures.unshift([`${(100 * best.val_score).toFixed(1)}%`, "score, right answers"]);
  $("headline").append(...figures.map(([value, title]) =>
    make("div", {}, make("dt", {}, title), make("dd", {}, value))));
}

/** Shows what the losses say of the run, each with the command that helps, which is shown once. */
function showVerdict() {
  const shown = new Set([""]);
  for (const [kind, text, command] of run.verdict) {
    $("verdict").append(make("p", { class: `verdict ${kind}` }, text));
    if (!shown.has(command)) $("verdict").append(make("div", { class: "commands" }, makeCommand("Try", command)));
    shown.add(command);
  }
}

function showYardsticks() {
  const cells = run.yardsticks.flatMap(([name, bits]) => {
    const kind = { class: name === "this model" && "is-model" };
    const bar = make("i", { ...kind, style: { width: `${100 * bits / run.yardsticks[0][1]}%` } });
    return [make("span", kind, name), bar, make("span", kind, bits.toFixed(3))];
  });
  if (!cells.length) return;
  const label = "Bits per byte of validation text";
  $("yardsticks").append(make("div", { class: "bars", role: "group", "aria-label": label }, cells),
    makeNote(`${label}: fewer are better.${run.about.xz_bits_per_byte ? " xz reads its first 0.3 MB at most." : ""}`));
}

function showCommands() {
  const { state } = run;
  const stopped = state?.state === "stopped" ? [["Resume", state.resume]] : [];
  for (const row of [...stopped, ...run.next]) $("next").append(...makeCommand(...row));
}

function makeCommand(title, command) {
  const words = command.split(" ").flatMap((word) => [make("span", {}, word), " "]);
  return [make("span", {}, title), make("code", {}, words), makeCopyButton(command)];
}

/** Marks the passages of a text that are copied from the training text. */
function markPassages(text, passages) {
  const letters = Array.from(text);
  const parts = [];
  let at = 0;
  for (const [start, length, place] of [...passages].sort((a, b) => a[0] - b[0])) {
    parts.push(letters.slice(at, start).join(""));
    parts.push(make("mark", { title: place }, letters.slice(start, start + length).join("")));
    at = start + length;
  }
  return [...parts, letters.slice(at).join("")];
}

const makeSample = (nodes) => make("pre", { class: "written", dir: "auto" }, nodes);

/** Lists the samples of a step, each with a function that makes its nodes. */
function listSamples(step, isMarked) {
  return run.samples.filter((sample) => sample.step === step).map(({ prompt, text }, i) => {
    const passages = (isMarked && run.memorization?.passages[i]) || [];
    const places = passages.map(([, length, place]) => `${length} characters of ${place}`).join("; ");
    const note = places && `Verbatim in the training text: ${places}.`;
    return { prompt, note, nodes: () => [make("b", {}, prompt), ...markPassages(text, passages)] };
  });
}

/** Shows samples over training: one on the first screen, all below. A slider chooses the step, also for `showFrame`. */
function showSamples(showFrame) {
  const steps = [...new Set(run.samples.map((sample) => sample.step))].sort((a, b) => a - b);
  for (const id of ["when", "play"]) $(id).hidden = steps.length < 2;
  $("samples").hidden = !steps.length;
  if (!steps.length) return;
  const used = steps.includes(run.best_step) ? run.best_step : steps.at(-1);
  const list = make("div");
  const choose = (i) => {
    saved.prompt = i;
    draw();
    $("prompts").children[i].focus();
  };
  const draw = () => {
    const step = steps[$("when").value];
    const { prompt = 0 } = saved;
    const samples = listSamples(step, step === used);
    const note = step === used && run.memorization?.note;
    const where = `step ${formatCount(step)}${step === run.best_step ? ", whose checkpoint is used" : ""}`;
    saved.step = step === used ? null : step;
    showFrame?.(saved.step);
    $("when-text").textContent = where;
    $("when").setAttribute("aria-valuetext", where);
    $("written").replaceChildren(...samples[Math.min(prompt, samples.length - 1)].nodes());
    $("prompts").replaceChildren(...samples.map((sample, i) => makeButton(`prompt ${i + 1}`, () => choose(i),
      { "aria-pressed": i === prompt, "aria-label": `prompt ${i + 1}: ${sample.prompt}` })));
    const content = samples.flatMap((sample) => [makeSample(sample.nodes()), sample.note && makeNote(sample.note)]);
    list.replaceChildren(...[...content, note && makeNote(note)].filter(Boolean));
  };
  $("samples").append(list);
  $("when").max = steps.length - 1;
  $("when").value = steps.indexOf(steps.includes(saved.step) ? saved.step : used);
  on("when", "input", draw);
  on("play", "click", () => playSamples(steps.indexOf(used), steps.length - 1));
  draw();
}

let playing = null;

/** Moves the slider from the first step, or from one before that of the model, to the last; a second click stops it. */
function playSamples(used, last) {
  const stop = () => {
    playing = clearInterval(playing);
    $("play").textContent = "Play";
  };
  const show = (value) => {
    $("when").value = value;
    $("when").dispatchEvent(new Event("input"));
  };
  if (playing) return void stop();
  show($("when").value < used ? $("when").value : 0);
  $("play").textContent = "Pause";
  playing = setInterval(() => {
    show(Number($("when").value) + 1);
    if (Number($("when").value) === last) stop();
  }, 1000 * PLAY_SECONDS);
}

/** Lists the habits of heads, each with the step and the head that first had it. */
function findFirstHabits(frames) {
  const found = frames.flatMap(({ step, habits }) =>
    habits.flatMap((habit, head) => (habit ? [{ title: habit[0], step, head }] : [])));
  return found.filter(({ title }, i) => found.findIndex((habit) => habit.title === title) === i);
}

/** Shows attention. Returns a function that shows the heads at a step of training; null: of the best checkpoint. */
function showAttention() {
  const data = run.attention;
  if (!data) return null;
  $("attention-none").hidden = true;
  $("attention-view").hidden = false;
  $("with-arcs").checked = saved.hasArcs || matchMedia("(max-width: 800px)").matches;  // a phone has no map
  on("with-arcs", "change", ({ target }) => { saved.hasArcs = target.checked; });
  const list = new TokenList($("tokens"), (row) => point(row));
  data.labels.forEach((label, i) => list.add(label, data.shared[i]));
  const [best, ...frames] = [data, ...run.frames].map(({ step, labels, weights, habits }) =>
    ({ step, triangles: new Triangles(weights, labels.length), habits }));
  let frame = best;
  const load = (head) => {
    saved.head = head;
    view.show(frame.triangles, head, 0);
    list.items.forEach((_, i) => list.paint(i, ...shadeToken(view.level(i))));
  };
  const view = new AttentionView(list, data.layers, data.heads, { point, load });
  function point(row, column) {
    saved.row = row;
    list.select(row);
    load(view.grid.current);
    view.draw(column);
  }
  const choose = (head) => {
    small.select(head);
    view.choose(head);
  };
  const small = new HeadGrid($("small-heads"), data.layers, data.heads, choose,
    { maxHeight: MAX_SMALL_GRID_HEIGHT, label: "Heads at this step" });
  const firsts = findFirstHabits(frames);
  $("small").hidden = !frames.length;
  const showFrame = (step) => {
    frame = (step !== null && frames.findLast((each) => each.step <= step)) || best;
    view.showHeads(frame.triangles, frame.habits);
    small.show(frame.triangles, frame.habits);
    load(view.grid.current);
    const texts = firsts.filter((first) => step === null || first.step <= step).map((first) =>
      `“${first.title}” from step ${formatCount(first.step)} (${small.name(first.head)})`);
    $("firsts").textContent = texts.length ? `Habits of heads: ${texts.join(", ")}.` : "No head has a habit yet.";
  };
  const induction = data.habits.findIndex((habit) => habit?.[0].startsWith("after"));
  const first = induction >= 0 ? induction : Math.max(0, data.habits.findIndex(Boolean));
  view.grid.select(saved.head ?? first);
  showFrame(null);
  const strengths = data.labels.map((_, row) => Math.max(0, ...best.triangles.row(view.head, row).slice(1, -1)));
  const strongest = strengths.lastIndexOf(Math.max(...strengths));  // on a token other than the first and itself
  point(Math.min(saved.row ?? strongest, data.labels.length - 1));
  return showFrame;
}

function showSettings() {
  const { settings, about: { typed = [], defaults = {} } } = run;
  const groups = { "Set by you": [], "Chosen automatically": [], "At their defaults": [] };
  for (const name of Object.keys({ ...settings, ...defaults })) {
    const isChosen = settings[name] !== undefined && [null, undefined, "auto"].includes(defaults[name]);
    const title = typed.includes(name) ? "Set by you" : isChosen ? "Chosen automatically" : "At their defaults";
    const cells = [name, formatSetting(settings[name])];
    groups[title].push(title === "Set by you" ? [...cells, formatSetting(defaults[name])] : cells);
  }
  for (const [title, rows] of Object.entries(groups).filter(([, rows]) => rows.length)) {
    const head = ["setting", "value", "default"].slice(0, rows[0].length);
    $("settings").append(make("details", { open: title !== "At their defaults" },
      make("summary", {}, `${title} (${rows.length})`), makeTable(head, rows)));
  }
  if (!$("settings").children[1]) $("settings").append(make("p", {}, "The run's folder has no config.toml."));
}

function showFacts(id, facts) {
  const tables = facts.map(Object.entries).filter((rows) => rows.length).map((rows) => makeTable([], rows));
  $(id).append(...tables.length ? tables : [make("p", {}, "Not recorded.")]);
}

/** Loads the page again during training, and keeps what the reader has chosen. */
function refresh(readCurves) {
  const details = [...document.querySelectorAll("details")];
  details.forEach((each, i) => { each.open = saved.open?.[i] ?? each.open; });
  addEventListener("pagehide", () => {
    const place = { scroll: scrollY, focus: document.activeElement.id, open: details.map(({ open }) => open) };
    storeState(stateKey, { ...saved, ...place, curves: readCurves() });
  });
  if (saved.focus) $(saved.focus)?.focus({ preventScroll: true });
  if (saved.scroll) scrollTo(0, saved.scroll);
  const isTraining = runs.some((each) => each.state?.state === "training");
  if (isTraining) setInterval(() => document.hidden || playing || location.reload(), 1000 * REFRESH_SECONDS);
}

function showPage() {
  const isSingle = runs.length === 1;
  const warnings = listWarnings(runs);
  const bitsFirst = !isSingle && (warnings.length > 0 || winner?.[0] === "warning");
  const title = isSingle ? run.name : `Compared: ${runs.map(({ name }) => name).join(", ")}`;
  document.title = title;
  $("title").textContent = title;
  $("notes").append(...runs.flatMap(({ notes }) => notes).map((text) => make("p", {}, text)));
  if (isList) $("notes").append(make("a", { href: "#" }, "All runs"));
  $("notes").append(...warnings.map((text) => make("p", { class: "warning" }, text)));
  if (isSingle) {
    $("sentence").textContent = run.sentence;
    if (run.state) showState();
    if (run.state?.state === "training") setInterval(showState, 1000);
    showHeadline();
    showVerdict();
    showYardsticks();
    showCommands();
    showSamples(showAttention());
    showSettings();
    showFacts("data-used", run.about.data ?? []);
    showFacts("machine", [run.about.machine ?? {}]);
  } else {
    showComparison(runs);
  }
  const shown = runs.map((each) => ({ ...each, status: each.state, baselines: each.about.baselines ?? {} }));
  const readCurves = showCurves(shown, { saved: saved.curves ?? {}, bitsFirst });
  history.scrollRestoration = "manual";
  refresh(readCurves);
}

if (isList) addEventListener("hashchange", () => location.reload());
if (isList && runs === all) showList(all);
else showPage();
