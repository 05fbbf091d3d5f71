/** The canvas of the page: a text, its tokens, its branches, and the heads that read it. */

const HUES = { surprise: [230, 159, 0], more: [213, 94, 0], less: [0, 158, 115] };  // Okabe–Ito
const MAX_CHANGE_BITS = 2;  // of full color
const OPENING_TOKENS = 64;  // that the page generates when it opens
const MAX_BRANCHES = 20;
const NUM_RANKS = 3;
const SETTINGS = ["temperature", "top_p", "top_k", "seed", "max_new_tokens"];
const FIELDS = [...SETTINGS, "typed", "draft"];
const makeBranch = (saved) => ({ ids: [], tokens: [], next: null, text: "", numPrompt: 0, settings: "", ...saved });

const { about } = JSON.parse($("data").textContent);
let chat, view, grid;
let branches = [];
let branch;  // the one that is shown
let attended = [];  // what the attention that is shown depends on: text and heads, chosen head
let measured = { ids: [], bits: [] };  // what each head is worth on a text
let isFollowing = false;
const list = new TokenList($("tokens"), (index) => {
  isFollowing = false;
  point(index);
});
const work = new Task("status", (isBusy) => {
  $("stop").disabled = !isBusy;
  $("tokens").setAttribute("aria-busy", isBusy);
});
const measuring = new Task("measure-status", (isBusy) => {
  $("measure").textContent = isBusy ? "Stop measuring" : "Measure all heads";
});

const stateKey = () => JSON.stringify(about.settings);
const color = () => document.querySelector("input[name=color]:checked").value;
const placeHead = (index) => [Math.floor(index / about.heads) + 1, index % about.heads + 1];
const listOff = () => [...grid.off].map(placeHead);

function readQuestion() {
  const query = { off: listOff() };
  for (const name of SETTINGS) if ($(name).value !== "") query[name] = Number($(name).value);
  return query;
}

/** What the numbers of a token depend on, besides the tokens before it. */
const settingsKey = () => JSON.stringify({ ...readQuestion(), seed: 0, max_new_tokens: 0 });

/** Describes the tokens of the branch: how many, and their mean surprise. */
function summarize() {
  const predicted = branch.tokens.filter((each) => each.bits);
  const mean = (which) => (predicted.reduce((sum, { bits }) => sum + bits[which], 0) / predicted.length).toFixed(2);
  const count = formatNoun(branch.tokens.length, "token");
  if (!predicted.length) return `${count}.`;
  const bits = `${mean(1)} bits each on average${grid.off.size ? `; ${mean(0)} with all heads` : ""}`;
  return `${count}, ${bits}.`;
}

/** Adds a branch and shows it; empty ones give way, and the oldest ones, but the first. */
function addBranch(name) {
  branch = makeBranch({ name });
  branches = [...branches.filter(({ ids }) => ids.length), branch];
  if (branches.length > MAX_BRANCHES) branches.splice(1, 1);
  drawBranches();
}

function drawBranches() {
  const open = (each) => {
    branch = each;
    drawBranches();
    read({ ids: each.ids });
  };
  $("branches").replaceChildren(...branches.length < 2 ? [] : branches.map((each, i) =>
    makeButton(`${i + 1}: ${each.name}`, () => open(each), { dir: "auto", "aria-pressed": each === branch })));
  showWorth();
}

function showText({ tokens, text, next }) {
  Object.assign(branch, { text, ids: [], tokens: [], settings: settingsKey() });
  list.clear();
  view.triangles = new Triangles();
  const ground = readColor("--panel");
  tokens.forEach((each) => addToken(each, ground));
  showNext(next);
}

function showNext(next) {
  branch.next = next;
  if (next) list.add("what comes next?").classList.add("next");
}

function addToken(each, ground) {
  const bits = each.bits ? `, ${each.bits[1].toFixed(1)} bits` : "";
  list.add(each.text, each.shared, `${each.text}${bits}`);
  branch.tokens.push(each);
  branch.ids.push(each.id);
  paintToken(branch.tokens.length - 1, ground);
}

async function read(query, selected = list.current) {
  const isComplete = await work.run("read", { ...readQuestion(), ...query }, ([answer]) => showText(answer), summarize);
  if (isComplete) point(clamp(selected, 0, list.items.length - 1));
}

/** Lets the model write on after ids, or after a text; then selects a token, and says `conclusion` or why it ended. */
async function write(query, { selected, conclusion } = {}) {
  if (!$("form").reportValidity()) return;
  const shown = branch;
  let end = "";
  isFollowing = true;
  const isComplete = await work.run("write", { ...readQuestion(), ...query }, (records) => {
    for (const record of records) {
      if (record.tokens) {
        showText({ ...record, next: null });
        shown.numPrompt = record.tokens.length;
      } else if (record.token) {
        addToken(record.token);
        shown.text += record.text;
      }
      end = record.end ?? end;
    }
    say("Generating…");
    if (isFollowing) $("text-box").scrollTop = $("text-box").scrollHeight;
  }, () => `${conclusion ?? `Done: ${end}.`} ${summarize()}`);
  if (branch !== shown || !shown.tokens.length) return;
  if (isComplete) await predict(shown.ids.length, (next) => branch === shown && showNext(next));
  point(isFollowing ? selected ?? findSurprising(shown.numPrompt) : list.current);
}

/** Asks without stopping the work on the text; returns whether there was no problem. */
const askBeside = (name, query, take) => ask(name, query, take).then(() => true, ({ message }) => say(message, true));

const predict = (at, take) =>
  askBeside("predict", { ...readQuestion(), ids: branch.ids, at }, ([answer]) => take(answer));

function findSurprising(start) {
  const bits = branch.tokens.map((each, i) => i >= start && each.bits ? each.bits[1] : -1);
  return Math.max(0, bits.indexOf(Math.max(...bits)));
}

/** Continues the text at its end, after what was typed there. */
function generate() {
  const text = $("typed").value;
  $("typed").value = "";
  write(branch.ids.length ? { ids: branch.ids, text } : { text });
}

function follow(index, id, label) {
  const ids = [...branch.ids.slice(0, index), id];
  addBranch(`“${label}” at token ${index + 1}`);
  write({ ids }, { selected: index });
}

/** Selects a token: its table, its colors and its attention follow. */
function point(index, column) {
  if (!(index in list.items)) return;
  list.select(index);
  describeToken();
  if (color() === "attention") paintTokens();
  view.draw(column);
  if (!work.request) showAttention();
}

const findSelected = () => branch.tokens[list.current] ?? branch.next;

/** Describes the selected token, and asks for its table if the settings have changed. */
function describeToken() {
  const each = findSelected();
  const settings = settingsKey();
  if (!each) return;
  fillTable(each, list.current);
  if (!each.likely || (each.settings ?? branch.settings) === settings) return;
  predict(list.current, (fresh) => {
    Object.assign(each, fresh, { settings });
    if (each === findSelected()) fillTable(each, list.current);
  });
}

function fillTable(each, index) {
  const hasOff = grid.off.size > 0;
  const isNext = index >= branch.tokens.length;
  $("token-title").textContent = isNext ? "What comes next" : `Token ${index + 1}: ${list.quote(index)}`;
  $("probability").textContent = each.bits ? describeProbability(each, hasOff)
    : each.likely ? "What the model expects after the last token." : "The model does not predict the first token.";
  $("likely").hidden = !each.likely;
  $("likely").querySelector(".off").hidden = !hasOff;
  const rows = makeRows((each.likely ?? []).map(([id, label, ...values]) => [
    makeButton(label, () => follow(index, id, label), { dir: "auto" }),
    ...values.filter((_, which) => which !== 1 || hasOff)
      .map((value) => [formatPercent(value), make("i", { style: { width: `${100 * value}%` } })]),
  ]));
  rows.forEach((row, i) => row.classList.toggle("chosen", each.likely[i][0] === each.id));
  $("likely").tBodies[0].replaceChildren(...rows);
}

function describeProbability({ p, bits }, hasOff) {
  const describe = (which) => `${formatPercent(p[which])} (${bits[which].toFixed(2)} bits)`;
  const change = hasOff ? `${describe(0)} → ${describe(1)} without the heads that are off` : describe(1);
  return `Probability ${change}; ${formatPercent(p[2])} with your temperature, top-k and top-p.`;
}

let isAsking = false;

/** Asks for the attention of all heads, and of the chosen one, in the window of the selected token. */
async function showAttention() {
  const at = Math.min(list.current, branch.tokens.length - 1);
  const wanted = JSON.stringify([branches.indexOf(branch), branch.ids.length, listOff()]);
  const hasHeads = view.triangles.has(at - view.start) && attended[0] === wanted;
  if (isAsking || at < 0 || (hasHeads && attended[1] === grid.current)) return;
  isAsking = true;
  const index = grid.current;
  const [layer, head] = placeHead(index);
  const query = { ids: branch.ids, at, off: listOff(), layer, head };
  const showHeads = ([{ weights, size, habits }]) => {
    view.showHeads(new Triangles(weights, size), habits);
    showWorth();
  };
  const showHead = ([{ weights, start, size }]) => view.show(new Triangles(weights, size), 0, start);
  const isComplete = (hasHeads || await askBeside("heads", query, showHeads))
    && await askBeside("attention", query, showHead);
  isAsking = false;
  if (!isComplete) return;
  attended = [wanted, index];
  paintTokens();
  view.draw();
  showAttention();  // of what was chosen meanwhile
}

/** Paints all tokens, and says what the colors mean. */
function paintTokens() {
  const ground = readColor("--panel");  // once: it makes the browser compute styles
  branch.tokens.forEach((_, index) => paintToken(index, ground));
  const texts = {
    surprise: `Full color: ${about.maxBits.toFixed(1)} bits, as surprising as if every token were equally likely.`,
    attention: "Color: the weight with which the selected token looks at it.",
    change: grid.off.size
      ? `Orange: more surprising without the heads that are off, green: less; full at ${MAX_CHANGE_BITS} bits.`
      : "Switch heads off to see what changes.",
  };
  $("scale").textContent = texts[color()];
}

function paintToken(index, ground = readColor("--panel")) {
  const { bits: [before, after] = [] } = branch.tokens[index];
  const mix = (hue, strength) => (strength >= 0 ? mixColors(ground, HUES[hue], strength) : ["", ""]);
  const paints = {
    attention: () => shadeToken(view.level(index)),
    surprise: () => mix("surprise", after / about.maxBits),
    change: () => mix(after > before ? "more" : "less", Math.abs(after - before) / MAX_CHANGE_BITS),
  };
  list.paint(index, ...paints[color()]());
}

/** Reads the text again without the heads that are off; the colors show the change. */
function switchHeads() {
  document.querySelector(`input[value=${grid.off.size ? "change" : "surprise"}]`).checked = true;
  if (branch.ids.length) read({ ids: branch.ids });
}

/** Runs each head off once over the text, and names those that it needs most. */
function measure() {
  if (measuring.request) return void measuring.stop();
  if (!branch.ids.length) return void say("Generate a text first.", true, "measure-status");
  const total = formatCount(grid.items.length);
  measured = { ids: [...branch.ids], bits: [] };
  measuring.run("measure", { ids: measured.ids }, (records) => {
    for (const { layer, head, bits } of records) if (layer) measured.bits[(layer - 1) * about.heads + head - 1] = bits;
    say(`Head ${formatCount(measured.bits.length)} of ${total}…`, false, "measure-status");
    showWorth();
  }, () => {
    const ranked = [...measured.bits.keys()].sort((a, b) => measured.bits[b] - measured.bits[a]).slice(0, NUM_RANKS);
    const names = ranked.map((index) => grid.describe(index)).join("; ");
    return `All ${total} heads measured. The text needs most: ${names}.`;
  });
}

/** Shows in the grid what the heads are worth, while their text is shown. */
function showWorth() {
  grid.bits = String(measured.ids) === String(branch.ids) ? measured.bits : [];
  grid.items.forEach((_, index) => grid.describe(index));
}

/** Begins another text, with the one that is shown to change. */
function startText() {
  const { text } = branch;
  addBranch("new text");
  showText({ tokens: [], text: "", next: null });
  fillTable({}, 0);
  $("typed").value = text;
  $("typed").focus();
  $("typed").select();
}

function showTab(isChat) {
  $("chat").hidden = !isChat;
  $("inside").hidden = isChat;
  (isChat ? $("talk-end") : $("status")).before($("settings"));
  $("show-chat").setAttribute("aria-pressed", isChat);
  $("show-text").setAttribute("aria-pressed", !isChat);
  if (!isChat && !branch.ids.length) read({ text: "" });
}

function lookInside(ids, name) {
  addBranch(name);
  branch.ids = ids;
  showTab(false);
  read({ ids }, ids.length - 1);
}

function showSettings() {
  for (const name of ["temperature", "top_p"]) $(`${name}-text`).textContent = $(name).value;
  if (list.current >= 0) describeToken();
}

/** Acts on Enter, unless it ends a composition: Safari tells that by the code 229. Shift+Enter adds a line. */
function onEnter(id, action) {
  on(id, "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    action();
  });
}

function listen() {
  on("form", "submit", (event) => {
    event.preventDefault();
    if (!$("inside").hidden) generate();
  });
  for (const id of ["typed", "tokens"]) onEnter(id, generate);
  on("stop", "click", () => work.stop());
  on("edit", "click", startText);
  on("read", "click", () => {
    const text = $("typed").value;
    $("typed").value = "";
    read({ ids: branch.ids, text }, 0).then(() => point(findSurprising(0)));
  });
  on("measure", "click", measure);
  on("on", "click", () => {
    grid.off.clear();
    showWorth();
    switchHeads();
  });
  for (const name of ["temperature", "top_p", "top_k"]) on(name, "input", showSettings);
  on("inside", "change", ({ target }) => target.name === "color" && paintTokens());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") for (const task of [work, measuring, chat?.task]) task?.stop();
  });
  on("show-chat", "click", () => showTab(true));
  on("show-text", "click", () => showTab(false));
  dark.addEventListener("change", paintTokens);
}

/** Fills the page with what is known of the model. */
function begin() {
  const { name, text, ...settings } = about.settings;
  $("name").textContent = name;
  document.title = `${name} – look inside`;
  $("shape").textContent = `${formatNoun(about.layers, "layer")} of ${formatNoun(about.heads, "head")}, context of `
    + `${formatNoun(about.contextLength, "token")}. The model is in this page, in 8 bits, and computes here.`;
  $("temperature").max = Math.max(2, settings.temperature);
  for (const [key, value] of Object.entries(settings)) $(key).value = value ?? "";
  view = new AttentionView(list, about.layers, about.heads, { point, load: showAttention, toggle: switchHeads });
  grid = view.grid;
  $("tabs").hidden = !about.isChatModel;
  listen();
  chat = about.isChatModel ? new Chat(about, readQuestion, lookInside) : null;
  restore(readState(stateKey()), text || about.prompts[0] || "");
  showSettings();
  addEventListener("pagehide", store);
}

/** Shows what the tab had before a reload, or else a text to begin with. */
function restore(saved, prompt) {
  FIELDS.forEach((id) => { $(id).value = saved.fields?.[id] ?? $(id).value; });
  chat?.restore(saved.chat ?? {});
  branches = (saved.branches ?? []).map(makeBranch);
  branch = branches[saved.branch];
  if (!branch) addBranch("the text");
  drawBranches();
  if (chat) showTab(saved.isChat ?? true);
  if (branch.ids.length) return void read({ ids: branch.ids }, 0);
  if (chat) return;
  $("typed").focus();
  const limit = Math.min(OPENING_TOKENS, Number($("max_new_tokens").value));
  write({ text: prompt, max_new_tokens: limit }, { conclusion: "A text to begin with." });
}

function store() {
  storeState(stateKey(), {
    fields: Object.fromEntries(FIELDS.map((id) => [id, $(id).value])),
    chat: chat && { turns: chat.turns, ids: chat.ids, retries: chat.retries },
    branches: branches.map(({ name, ids, numPrompt }) => ({ name, ids, numPrompt })),
    isChat: !$("chat").hidden, branch: branches.indexOf(branch),
  });
}

begin();
