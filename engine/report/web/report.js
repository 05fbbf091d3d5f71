/** The page of a run: its first screen, samples, attention and settings. */

const REFRESH_SECONDS = 10;
const YARDSTICKS = "uniform: all tokens equally likely; unigram: by how often each occurs; "
  + "bigram: by the token before; xz -9: a compressor, on the first 0.3 MB.";
const MAX_SMALL_GRID_HEIGHT = 160;  // pixels, of the heads beside a sample
const { runs: all, winner, is_list: isList } = JSON.parse($("data").textContent);
const marked = isList ? all.filter(({ name }) => readMarked().includes(name)) : [];
const runs = marked.length > 1 ? marked : all;
const run = runs[0];
const formatSetting = (value) =>
  typeof value === "string" && value ? value : JSON.stringify(value ?? "not set").replaceAll('"', "") || "not set";

/** Shows the state of the run; called every second of its training, in which screen readers do not read it out. */
function showState() {
  const { state, settings } = run;
  const isCut = settings.steps > state.step && settings.minutes;
  const cut = isCut ? `, of ${formatCount(settings.steps)} at most in ${formatNoun(settings.minutes, "minute")}` : "";
  const seconds = Math.max(0, Date.now() / 1000 - state.updated_at);
  const secondsLeft = Math.max(0, state.seconds_left - seconds);
  const left = state.seconds_left === null ? "" : `, ${formatSeconds(secondsLeft)} left`;
  const of = state.total_steps ? ` of ${formatCount(state.total_steps)}` : "";
  const texts = {
    training: `Training – ${Math.floor(100 * state.progress)}%${left} · updated ${formatSeconds(seconds)} ago`,
    done: `Done in ${formatSeconds(state.seconds)}, ${formatCount(state.step)} steps${cut}`,
    stopped: `Stopped at step ${formatCount(state.step)}${of}`,
  };
  $("state").textContent = texts[state.state];
  $("state").className = `state ${state.state}`;
  $("state").setAttribute("aria-live", state.state === "training" ? "off" : "polite");
}

function showHeadline() {
  const { best } = run;
  const figures = best ? [
    [formatLoss(best.val_loss), "validation loss"],
    [formatLoss(best.val_bits_per_byte), "bits per byte"],
    [formatAmount(best.val_perplexity), "perplexity"],
    [formatCount(best.step), "step used"],
  ] : [["", "No evaluation yet."]];
  if (best?.val_score !== undefined) figures.unshift([`${(100 * best.val_score).toFixed(1)}%`, "score, right answers"]);
  $("headline").append(...figures.map(([value, title]) =>
    make("div", {}, make("dt", {}, title), make("dd", {}, value))));
}

/** Shows what the losses say of the run, with the command that helps. */
function showVerdict() {
  if (!run.verdict) return;
  const [kind, text, command] = run.verdict;
  $("verdict").append(make("p", { class: `verdict ${kind}` }, text));
  if (command) $("verdict").append(make("div", { class: "commands" }, makeCommand("Try", command)));
}

function showYardsticks() {
  const cells = run.yardsticks.flatMap(([name, bits]) => {
    const kind = { class: name === "this model" && "is-model" };
    const bar = make("i", { ...kind, style: { width: `${100 * bits / run.yardsticks[0][1]}%` } });
    return [make("span", kind, name), bar, make("span", kind, formatLoss(bits))];
  });
  if (!cells.length) return;
  const label = "Bits per byte of validation text";
  $("yardsticks").append(make("div", { class: "bars", role: "group", "aria-label": label }, cells),
    makeNote(`${label}: fewer are better. ${YARDSTICKS}`));
}

function showCommands() {
  const { state } = run;
  const stopped = state?.state === "stopped" ? [["Resume", state.resume]] : [];
  for (const row of [...stopped, ...run.next]) $("next").append(...makeCommand(...row));
}

function makeCommand(title, command) {
  const words = command.split(" ").flatMap((word) => [make("span", {}, word), " "]);
  return [make("span", {}, title), make("code", {}, words), makeCopyButton(() => command)];
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
    return { note, nodes: () => [make("b", {}, prompt), ...markPassages(text, passages)] };
  });
}

/** Shows samples over training: one on the first screen, all below. A slider chooses the step, also for `showFrame`. */
function showSamples(showFrame) {
  const steps = [...new Set(run.samples.map((sample) => sample.step))].sort((a, b) => a - b);
  $("when").hidden = steps.length < 2;
  $("samples").hidden = !steps.length;
  if (!steps.length) return;
  const used = steps.includes(run.best_step) ? run.best_step : steps.at(-1);
  const list = make("div");
  const draw = () => {
    const step = steps[$("when").value];
    const samples = listSamples(step, step === used);
    const note = step === used && run.memorization?.note;
    const where = `step ${formatCount(step)}${step === run.best_step ? ", whose checkpoint is used" : ""}`;
    showFrame?.(step === used ? null : step);
    $("when-text").textContent = where;
    $("when").setAttribute("aria-valuetext", where);
    $("written").replaceChildren(...samples[0].nodes());
    const content = samples.flatMap((sample) => [makeSample(sample.nodes()), sample.note && makeNote(sample.note)]);
    list.replaceChildren(...[...content, note && makeNote(note)].filter(Boolean));
  };
  $("samples").append(list);
  $("when").max = steps.length - 1;
  $("when").value = steps.indexOf(used);
  on("when", "input", draw);
  draw();
}

/** Shows attention. Returns a function that shows the heads at a step of training; null: of the best checkpoint. */
function showAttention() {
  const data = run.attention;
  if (!data) return null;
  $("attention-none").hidden = true;
  $("attention-view").hidden = false;
  const list = new TokenList($("tokens"), (row) => point(row));
  data.labels.forEach((label, i) => list.add(label, data.shared[i]));
  const [best, ...frames] = [data, ...run.frames].map(({ step, ids, texts, weights }) => {
    const triangles = new Triangles(weights, ids.length);
    const weigh = (...place) => triangles.weight(...place);
    return { step, triangles, habits: nameHeads(data.layers * data.heads, weigh, ids, texts) };
  });
  let frame = best;
  const load = (head) => {
    view.show(frame.triangles, head, 0);
    list.items.forEach((_, i) => list.paint(i, ...shadeToken(view.level(i))));
  };
  const view = new AttentionView(list, data.layers, data.heads, { point, load });
  function point(row, column) {
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
  $("small").hidden = !frames.length;
  const showFrame = (step) => {
    frame = (step !== null && frames.findLast((each) => each.step <= step)) || best;
    view.showHeads(frame.triangles, frame.habits);
    small.show(frame.triangles, frame.habits);
    load(view.grid.current);
  };
  const induction = best.habits.findIndex((habit) => habit?.[0].startsWith("after"));
  const first = induction >= 0 ? induction : Math.max(0, best.habits.findIndex(Boolean));
  view.grid.select(first);
  showFrame(null);
  point(data.ids.length - 1);
  return showFrame;
}

function showSettings() {
  const { settings, about: { typed = {}, defaults = {} } } = run;
  const groups = { "Set by you": [], "Chosen automatically": [], "At their defaults": [] };
  for (const name of Object.keys({ ...settings, ...typed, ...defaults })) {
    const isChosen = settings[name] !== undefined && [null, undefined, "auto"].includes(defaults[name]);
    const title = name in typed ? "Set by you" : isChosen ? "Chosen automatically" : "At their defaults";
    const cells = [name, formatSetting(settings[name] ?? typed[name])];
    groups[title].push(title === "Set by you" ? [...cells, formatSetting(defaults[name])] : cells);
  }
  for (const [title, rows] of Object.entries(groups).filter(([, rows]) => rows.length)) {
    const head = ["setting", "value", "default"].slice(0, rows[0].length);
    $("settings").append(make("details", { open: title !== "At their defaults" },
      make("summary", {}, `${title} (${rows.length})`), makeTable(head, rows)));
  }
}

function showFacts(id, facts) {
  $(id).append(...facts.map((fact) => makeTable([], Object.entries(fact))));
}

/** Loads the page again during training, until the reader does something, which would be lost. */
function refresh() {
  let isUsed = false;
  for (const type of ["pointerdown", "keydown"]) addEventListener(type, () => { isUsed = true; });
  const isTraining = runs.some(({ state }) => state?.state === "training");
  if (isTraining) setInterval(() => document.hidden || isUsed || location.reload(), 1000 * REFRESH_SECONDS);
}

function showPage() {
  const isSingle = runs.length === 1;
  const title = isSingle ? run.name : `Compared: ${runs.map(({ name }) => name).join(", ")}`;
  document.title = title;
  $("title").textContent = title;
  $("notes").append(...runs.flatMap(({ notes }) => notes).map((text) => make("p", {}, text)));
  if (isList) $("notes").append(make("a", { href: "#" }, "All runs"));
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
  showCurves(runs);
  refresh();
}

if (isList) addEventListener("hashchange", () => location.reload());
if (isList && runs === all) showList(all);
else showPage();
