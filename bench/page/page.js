// The results page: a table that sorts and filters, charts, and the differences of chosen runs.
"use strict";

const ROWS_AT_ONCE = 300; // of the table; more are drawn as it is scrolled
const MOST_DRAWN_AS_SHAPES = 2000; // points of a chart; more are drawn as a picture, which is faster
const data = JSON.parse(document.getElementById("data").textContent);
const { columns, charts, usual, texts } = data;
const [runs, memory] = [data.runs, data.memory].map(rowsOf);
runs.forEach((run, number) => Object.assign(run, { number, words: wordsOf(run) }));
const runOf = new Map(runs.map((run) => [run.run, run]));
const chosen = new Set(data.chosen);
const [headings, body, scroll] = ["#runs thead tr", "#runs tbody", ".scroll"].map((place) => document.querySelector(place));
const collator = new Intl.Collator("en", { numeric: true });
let sorting = { key: "run", ascending: true };
let wanted = []; // the runs of the table, of which the first are drawn
let drawings = 0; // of the chosen runs

function element(name, text = "", attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(text);
  return made;
}

function shown(value) {
  return value === null ? "-" : typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value;
}

// -- the data: a text stands once in `texts`, and in rows as a list with its number

function rowsOf({ keys, rows }) {
  return rows.map((row) => Object.fromEntries(keys.map((key, place) => [key, Array.isArray(row[place]) ? texts[row[place][0]] : row[place]])));
}

function wordsOf(run) {
  return [run.device, run.folder, ...columns.map(({ key }) => run[key])].join(" ").toLowerCase();
}

// -- the table

function compare(one, other) {
  const [a, b] = [one[sorting.key], other[sorting.key]];
  if (a === null || b === null) return (a === null) - (b === null); // what is missing stands last
  const order = typeof a === "number" ? a - b : collator.compare(a, b);
  return sorting.ascending ? order : -order;
}

function drawTable() {
  for (const heading of headings.querySelectorAll("th[data-key]")) {
    const isSorted = heading.dataset.key === sorting.key;
    heading.ariaSort = isSorted ? (sorting.ascending ? "ascending" : "descending") : "none";
  }
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/);
  wanted = runs.filter((run) => words.every((word) => run.words.includes(word))).sort(compare);
  body.replaceChildren();
  drawMoreRows();
  document.getElementById("count").textContent = `${wanted.length} of ${runs.length} runs`;
}

function drawMoreRows() {
  const drawn = body.children.length;
  body.append(...wanted.slice(drawn, drawn + ROWS_AT_ONCE).map(drawRow));
}

function drawRow(run) {
  const row = element("tr", "", { className: chosen.has(run.run) ? "chosen" : "" });
  const box = element("input", "", { type: "checkbox", checked: chosen.has(run.run), ariaLabel: `Choose ${run.run}` });
  box.addEventListener("change", () => choose(run, row, box.checked));
  row.append(element("td", box));
  for (const { key, is_number } of columns) {
    row.append(element("td", shown(run[key]), { className: is_number ? "number" : "" }));
  }
  return row;
}

function drawHeadings() {
  headings.append(element("th", element("span", "Choose")));
  for (const { key, title, is_number } of columns) {
    const button = element("button", title, { type: "button" });
    button.addEventListener("click", () => {
      sorting = { key, ascending: sorting.key === key ? !sorting.ascending : true };
      drawTable();
    });
    const heading = element("th", button, { className: is_number ? "number" : "" });
    heading.dataset.key = key;
    headings.append(heading);
  }
}

// -- the chosen runs, whose details are in the page, or in files beside it

const loads = new Map(); // by the number of a file: what ends with its content, or with null where it is not there
const arrivals = new Map();

function details(number, content) {
  arrivals.get(number)(content);
}

function load(number) {
  if (data.details) return data.details[number];
  if (!loads.has(number)) {
    loads.set(number, new Promise((resolve) => {
      arrivals.set(number, resolve);
      const src = `${data.folder}/${number}.js`;
      document.head.append(element("script", "", { src, onerror: () => resolve(null) }));
    }));
  }
  return loads.get(number);
}

async function withDetails(run) {
  const number = Math.floor(run.number / data.together);
  const together = await load(number);
  const missing = `(the details are in ${data.folder}/${number}.js, which is not beside this page)`;
  const none = { command: missing, gallery: [], settings: {}, losses: {} };
  return { ...run, ...(together ? together[run.number % data.together] : none) };
}

function choose(run, row, isChosen) {
  chosen[isChosen ? "add" : "delete"](run.run);
  row.classList.toggle("chosen", isChosen);
  drawChosen();
}

async function drawChosen() {
  const drawing = ++drawings;
  const picked = await Promise.all([...chosen].map((name) => withDetails(runOf.get(name))));
  if (drawing !== drawings) return; // others were chosen meanwhile
  document.getElementById("difference").replaceChildren(...(picked.length < 2 ? [] : differences(picked.slice(-2))));
  document.getElementById("commands").replaceChildren(...picked.flatMap(commandOf));
  const losses = picked.flatMap(lossesOf);
  if (losses.length) await drawChart("losses", { losses });
  else document.getElementById("losses").replaceChildren();
}

function lossesOf({ run, losses }) {
  return Object.entries(losses).flatMap(([kind, points]) => points.map(([step, loss]) => ({ run, "loss of": kind, step, loss })));
}

function differences(pair) {
  const [one, other] = pair.map(({ settings }) => ({ ...usual, ...settings }));
  const names = Object.keys(usual).filter((name) => one[name] !== null && other[name] !== null).sort(); // others mean nothing for one run
  const differ = names.filter((name) => one[name] !== other[name]);
  const table = element("table");
  table.append(line("th", ["Setting", ...pair.map(({ run }) => run)]));
  for (const name of differ) table.append(line("td", [name, one[name], other[name]]));
  const title = differ.length ? "Settings in which the last two differ" : "The last two have the same settings";
  return [element("h3", title), differ.length ? table : ""];
}

function line(kind, texts) {
  const row = element("tr");
  row.append(...texts.map((text) => element(kind, text)));
  return row;
}

function commandOf(run) {
  return [element("strong", run.run), ` in ${run.folder}, on ${run.device}`, element("pre", run.command), galleryOf(run)];
}

function galleryOf(run) {
  const gallery = element("div", "", { className: "gallery" });
  for (const { picture, question, is_hit, ...said } of run.gallery) {
    const figure = element("figure", element("img", "", { src: picture, alt: question }));
    const lines = Object.entries(said).map(([name, answer]) => element("div", `${name}: ${answer}`));
    const caption = element("figcaption", element("strong", question), { className: is_hit ? "" : "miss" });
    caption.append(...lines);
    figure.append(caption);
    gallery.append(figure);
  }
  return gallery;
}

// -- the charts

function drawChart(place, datasets) {
  const points = Math.max(...Object.values(datasets).map((rows) => rows.length));
  const renderer = points > MOST_DRAWN_AS_SHAPES ? "canvas" : "svg";
  // `ast`: expressions are read, not compiled, which the page's policy forbids
  return vegaEmbed(`#${place}`, { ...charts[place], datasets }, { actions: false, renderer, ast: true });
}

// -- everything

drawHeadings();
drawTable();
document.getElementById("filter").addEventListener("input", drawTable);
scroll.addEventListener("scroll", () => {
  if (scroll.scrollTop + 2 * scroll.clientHeight > scroll.scrollHeight) drawMoreRows();
});
const drawn = [drawChosen(), drawChart("memory", { memory }), ...["quality-time", "quality-memory"].map((place) => drawChart(place, { runs }))];
Promise.all(drawn).then(() => (document.body.dataset.drawn = "true"));
