/** The canvas of the live page: a text, its tokens, its branches, and the heads that read it. */

const HUES = { surprise: [230, 159, 0], more: [213, 94, 0], less: [0, 158, 115] };  // Okabe–Ito
const MAX_CHANGE_BITS = 2;  // of full color
const OPENING_TOKENS = 64;  // that the page generates when it opens
const MAX_BRANCHES = 20;
const NUM_RANKS = 10;
const SCRIPTS = ["Arabic", "Armenian", "Bengali", "Cyrillic", "Devanagari", "Georgian", "Greek", "Han", "Hangul",
  "Hebrew", "Hiragana", "Katakana", "Tamil", "Telugu", "Thai"];
const SETTINGS = ["temperature", "top_p", "top_k", "seed", "max_new_tokens"];
const FIELDS = [...SETTINGS, "typed", "draft"];
const makeBranch = (saved) => ({ ids: [], tokens: [], next: null, text: "", numPrompt: 0, settings: "", ...saved });

let about, chat, view, grid;
let branches = [];
let branch;  // the one that is shown
let attended = [];  // what the attention that is shown depends on: text and heads, chosen head
let measured = { name: "", ids: [], bits: [] };  // what each head is worth on a text
let colorBefore = null;  // heads were switched off
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
  const added = branch.tokens.length - branch.numPrompt;
  const count = branch.numPrompt && added ? `${formatNoun(added, "new token")} after ${formatCount(branch.numPrompt)}`
    : formatNoun(branch.tokens.length, "token");
  if (!predicted.length) return `${count}.`;
  const bits = `${mean(1)} bits each on average${grid.off.size ? `; ${mean(0)} with all heads` : ""}`;
  return `${count}, ${bits}.${SCRIPTS.map(describeScript).join("")}`;
}

/** Says how many tokens a letter of a script takes in the branch, if they are more than one. */
function describeScript(name) {
  const pattern = new RegExp(`\\p{Script=${name}}`, "gu");
  const numLetters = branch.text.match(pattern)?.length ?? 0;
  const numTokens = branch.tokens.reduce((sum, { text, shared }) =>
    sum + (shared?.[1].match(pattern) ? shared[0] : text.match(pattern) ? 1 : 0), 0);
  return numTokens > numLetters ? ` ${name}: ${(numTokens / numLetters).toFixed(1)} tokens a letter.` : "";
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
  showRanks();
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

/** Lets the model write on after ids, or after a text; then selects a token. */
async function write(query, selected) {
  if (!$("form").reportValidity()) return;
  const shown = branch;
  let end = "";
  isFollowing = true;
  showEditor(false);
  const isComplete = await work.run("write", { ...readQuestion(), ...query }, (records) => {
    const box = $("text-box");
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
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
    if (isFollowing && isAtEnd) box.scrollTop = box.scrollHeight;
  }, () => {
    if (!end) throw new Error(INCOMPLETE);
    return `Done: ${end}. ${summarize()}`;
  });
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
  const isNew = !$("whole").hidden || !branch.ids.length;
  const text = $($("whole").hidden ? "typed" : "whole").value;
  $("typed").value = "";
  if (isNew) addBranch("new text");
  write(isNew ? { text } : { ids: branch.ids, text });
}

function follow(index, id, label) {
  const ids = [...branch.ids.slice(0, index), id];
  addBranch(`“${label}” at token ${index + 1}`);
  write({ ids }, index);
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
    showRanks();
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
    surprise: `Full color: ${about.max_bits.toFixed(1)} bits, as surprising as if every token were equally likely.`,
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
    surprise: () => mix("surprise", after / about.max_bits),
    change: () => mix(after > before ? "more" : "less", Math.abs(after - before) / MAX_CHANGE_BITS),
  };
  list.paint(index, ...paints[color()]());
}

/** Reads the text again without the heads that are off; the colors show the change. */
function switchHeads() {
  if (grid.off.size && colorBefore === null) colorBefore = color();
  const shown = grid.off.size ? "change" : colorBefore ?? color();
  if (!grid.off.size) colorBefore = null;
  document.querySelector(`input[value=${shown}]`).checked = true;
  if (branch.ids.length) read({ ids: branch.ids });
}

/** Runs each head off once over the text, and ranks them. */
function measure() {
  if (measuring.request) return void measuring.stop();
  if (!branch.ids.length) return void say("Generate a text first.", true, "measure-status");
  const total = formatCount(grid.items.length);
  measured = { name: `${branches.indexOf(branch) + 1}: ${branch.name}`, ids: [...branch.ids], bits: [] };
  measuring.run("measure", { ids: measured.ids }, (records) => {
    for (const { layer, head, bits } of records) if (layer) measured.bits[(layer - 1) * about.heads + head - 1] = bits;
    say(`Head ${formatCount(measured.bits.length)} of ${total}…`, false, "measure-status");
    showRanks();
  }, () => `All ${total} heads measured.`);
}

/** Ranks the heads that were measured. The grid has the numbers while their text is shown. */
function showRanks() {
  const { name, ids, bits } = measured;
  const isShown = String(ids) === String(branch.ids);
  grid.bits = isShown ? bits : [];
  grid.items.forEach((_, index) => grid.describe(index));
  const ranked = [...bits.keys()].sort((a, b) => bits[b] - bits[a]);
  const rows = ranked.slice(0, NUM_RANKS).map((index, i) =>
    [`${i + 1}. ${grid.name(index)}`, grid.habits[index]?.[0] ?? "–", formatSigned(bits[index])]);
  const note = `Measured on ${name} (${formatNoun(ids.length, "token")})${isShown ? "" : ". Another text is shown"}.`;
  const table = makeTable(["without", "habit", "bits per token"], rows);
  $("ranks").replaceChildren(...rows.length ? [makeNote(note), table] : []);
}

/** Shows the text to type another, or returns to the tokens. */
function showEditor(isOpen) {
  const hadFocus = document.activeElement === $("whole");
  $("whole").hidden = !isOpen;
  $("text-box").hidden = isOpen;
  $("read").hidden = !isOpen;
  $("edit").textContent = isOpen ? "Back" : "New text";
  const ofTokens = "#colors, #branches, #inside section:not([aria-labelledby=text-title])";
  for (const each of document.querySelectorAll(ofTokens)) each.inert = isOpen;
  if (hadFocus) $("typed").focus();
  if (!isOpen) return;
  $("whole").value = branch.text;
  $("whole").focus();
  $("whole").select();
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
  showEditor(false);
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
  for (const id of ["typed", "tokens", "whole"]) onEnter(id, generate);
  on("stop", "click", () => work.stop());
  on("edit", "click", () => showEditor($("whole").hidden));
  on("read", "click", () => {
    addBranch("your text");
    showEditor(false);
    read({ text: $("whole").value }, 0).then(() => point(findSurprising(0)));
  });
  on("measure", "click", measure);
  on("on", "click", () => {
    grid.off.clear();
    showRanks();
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

/** Fills the page with what the server tells of the model. */
function begin([answer]) {
  about = answer;
  const { name, text, ...settings } = about.settings;
  $("name").textContent = name;
  document.title = `${name} – look inside`;
  $("shape").textContent = `${formatNoun(about.layers, "layer")} of ${formatNoun(about.heads, "head")}, context of `
    + `${formatNoun(about.context_length, "token")}. ${PLACE}`;
  $("temperature").max = Math.max(2, settings.temperature);
  for (const [key, value] of Object.entries(settings)) $(key).value = value ?? "";
  view = new AttentionView(list, about.layers, about.heads, { point, load: showAttention, toggle: switchHeads });
  grid = view.grid;
  $("main").hidden = false;  // not earlier: what is typed before would be overwritten
  $("tabs").hidden = !about.is_chat_model;
  listen();
  chat = about.is_chat_model ? new Chat(about, readQuestion, lookInside) : null;
  restore(readState(stateKey()), text || about.prompts[0] || "");
  showSettings();
  addEventListener("pagehide", store);
}

/** Shows what the tab had before a reload, or else a text to begin with. */
function restore(saved, prompt) {
  FIELDS.forEach((id) => { $(id).value = saved.fields?.[id] ?? $(id).value; });
  chat?.restore(saved.chat ?? {});
  for (const index of saved.off ?? []) grid.off.add(index);
  measured = saved.measured ?? measured;
  grid.select(saved.head ?? 0);
  if (saved.color) document.querySelector(`input[value=${saved.color}]`).checked = true;
  branches = (saved.branches ?? []).map(makeBranch);
  branch = branches[saved.branch];
  if (!branch) addBranch("the text");
  drawBranches();
  if (chat) showTab(saved.isChat ?? true);
  if (branch.ids.length) return void read({ ids: branch.ids }, saved.selected);
  if (chat) return;
  $("typed").focus();
  write({ text: prompt, max_new_tokens: Math.min(OPENING_TOKENS, Number($("max_new_tokens").value)) });
}

function store() {
  chat?.takeBack();
  storeState(stateKey(), {
    fields: Object.fromEntries(FIELDS.map((id) => [id, $(id).value])),
    chat: chat && { turns: chat.turns, ids: chat.ids, retries: chat.retries },
    branches: branches.map(({ name, ids, numPrompt }) => ({ name, ids, numPrompt })),
    isChat: !$("chat").hidden, branch: branches.indexOf(branch), selected: list.current, color: color(),
    head: grid.current, off: [...grid.off], measured,
  });
}

ask("about", {}, begin).catch((error) => say(error.message, true, "shape"));
