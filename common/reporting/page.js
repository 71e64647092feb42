// The results page: a table that sorts and filters, charts, and the differences of chosen runs.
"use strict";

const { columns, runs, charts, chosen: chosenAtFirst } = JSON.parse(document.getElementById("data").textContent);
const chosen = new Set(chosenAtFirst);
const [headings, body] = [document.querySelector("#runs thead tr"), document.querySelector("#runs tbody")];
let sorting = { key: "run", ascending: true };
let losses = null; // the chart, once it is drawn

function element(name, text = "", attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(text);
  return made;
}

function shown(value) {
  return value === null ? "-" : typeof value === "number" ? value.toLocaleString("en", { maximumFractionDigits: 4 }) : value;
}

// -- the table

function compare(one, other) {
  const [a, b] = [one[sorting.key], other[sorting.key]];
  if (a === null || b === null) return (a === null) - (b === null); // what is missing stands last
  const order = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
  return sorting.ascending ? order : -order;
}

function isWanted(run) {
  const text = [run.device, run.command, ...columns.map(({ key }) => run[key])].join(" ").toLowerCase();
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/);
  return words.every((word) => text.includes(word));
}

function drawTable() {
  for (const heading of headings.querySelectorAll("th[data-key]")) {
    const isSorted = heading.dataset.key === sorting.key;
    heading.ariaSort = isSorted ? (sorting.ascending ? "ascending" : "descending") : "none";
  }
  const wanted = runs.filter(isWanted).sort(compare);
  body.replaceChildren(...wanted.map(drawRow));
  document.getElementById("count").textContent = `${wanted.length} of ${runs.length} runs`;
}

function drawRow(run) {
  const row = element("tr", "", { className: chosen.has(run.run) ? "chosen" : "" });
  const box = element("input", "", { type: "checkbox", checked: chosen.has(run.run), ariaLabel: `Choose ${run.run}` });
  box.addEventListener("change", () => choose(run, row, box.checked));
  row.append(element("td", box));
  for (const { key, is_number } of columns) {
    row.append(element("td", shown(run[key]), { className: is_number ? "number" : "", title: key === "run" ? run.command : "" }));
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

// -- the chosen runs

function choose(run, row, isChosen) {
  chosen[isChosen ? "add" : "delete"](run.run);
  row.classList.toggle("chosen", isChosen);
  drawChosen();
}

function drawChosen() {
  const picked = [...chosen].map((name) => runs.find(({ run }) => run === name));
  document.getElementById("difference").replaceChildren(...(picked.length < 2 ? [] : differences(picked.slice(-2))));
  document.getElementById("commands").replaceChildren(...picked.flatMap(commandOf));
  if (losses) losses.signal("chosen", [...chosen]).runAsync();
}

function differences([one, other]) {
  const names = Object.keys(one.settings).filter((name) => name in other.settings).sort(); // others mean nothing for one run
  const differ = names.filter((name) => one.settings[name] !== other.settings[name]);
  const table = element("table");
  table.append(line("th", ["Setting", one.run, other.run]));
  for (const name of differ) table.append(line("td", [name, one.settings[name], other.settings[name]]));
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

// -- everything

drawHeadings();
drawTable();
drawChosen();
document.getElementById("filter").addEventListener("input", drawTable);
const options = { actions: false, renderer: "svg" };
const drawn = Object.entries(charts).map(async ([place, chart]) => {
  const { view } = await vegaEmbed(`#${place}`, chart, options);
  if (place === "losses") losses = view;
});
Promise.all(drawn).then(() => {
  document.body.dataset.drawn = "true";
  drawChosen();
});
