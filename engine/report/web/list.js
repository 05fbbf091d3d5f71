/** The page of all runs: a table to sort. Marked runs are compared, and named by the address. */

const makeAddress = (name) => `${name.split("/").map(encodeURIComponent).join("/")}/report.html`;
const readMarked = () => new URLSearchParams(location.hash.slice(1)).getAll("run");

const makeMark = (run) => run.problem ? ""
  : make("input", { type: "checkbox", value: run.name, "aria-label": `mark ${run.name}` });

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
