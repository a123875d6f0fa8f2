"use strict";
// One request a second while the page is visible; what it shows of the past is what it has seen itself.

const ROOT = new URL("../../v1/dymoe/", document.baseURI); // relative, so that the page works behind --root-path
const PERIOD_MS = 1000, WINDOW_S = 300, PATIENCE_MS = 20000;
const SCORE_BITS = 6, MOST_SCORE = 63; // a cell: two bits of precision, six of score (vllm_dymoe/server/live.py)
const NAMES = ["not on the device", "low", "high"], COLOURS = ["--absent", "--low", "--high"];

const $ = (id) => document.getElementById(id);
let ranks = [], rank = 0, before = null, history = [], cursor = null, at = null, hover = null;

// -- numbers -------------------------------------------------------------------------------------

function short(value, digits = 3) {
  if (value === null || !isFinite(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.01) return "< 0.01";
  const fixed = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.max(Math.abs(value), 0.1))));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(fixed, 2) });
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit++; }
  return `${short(value)} ${units[unit]}`;
}

const CHARTS = [
  { name: "Decode", unit: "tokens/s", of: (d, s) => d.decoded_tokens / s },
  { name: "Prompts", unit: "tokens/s", of: (d, s) => d.prompt_tokens / s },
  { name: "Hits", unit: "%", top: () => 100,
    of: (d) => d.hits + d.misses ? 100 * d.hits / (d.hits + d.misses) : null },
  { name: "Link", unit: "MB/s", of: (d, s) => d.link_bytes / s / 1e6,
    top: (r) => r.link_limit === null ? null : r.link_limit / 1e6 },
  { name: "CPU", unit: "cores", top: (r) => r.cores, of: (d, s) => d.cpu_seconds / s },
  { name: "Disk", unit: "MB/s", of: (d, s) => d.disk_bytes / s / 1e6 },
];

// -- charts --------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function element(parent, name, attributes = {}, text = "", space = null) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function makeCharts() {
  for (const chart of CHARTS) {
    const figure = element($("charts"), "figure");
    const caption = element(figure, "figcaption");
    element(caption, "span", {}, chart.name);
    chart.scale = element(caption, "span");
    const value = element(figure, "strong");
    chart.value = element(value, "span", {}, "–");
    element(value, "small", {}, ` ${chart.unit}`);
    chart.svg = element(figure, "svg", { viewBox: "0 0 300 54", preserveAspectRatio: "none", role: "img" }, "", SVG);
    chart.area = element(chart.svg, "path", { class: "area" }, "", SVG);
    element(chart.svg, "path", { class: "base", d: "M0 54H300" }, "", SVG);
    chart.curve = element(chart.svg, "path", { class: "curve" }, "", SVG);
    chart.mark = element(chart.svg, "path", { class: "cursor" }, "", SVG);
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      cursor = WINDOW_S * (1 - (event.clientX - box.left) / box.width);
      drawCharts();
    });
    chart.svg.addEventListener("pointerleave", () => { cursor = null; drawCharts(); });
  }
  $("charts").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
    if (event.key === "Escape") cursor = null;
    else if (step) cursor = Math.min(WINDOW_S, Math.max(0, (cursor ?? 0) + step));
    else return;
    event.preventDefault();
    drawCharts();
  });
}

/** The sample that is nearest to so many seconds ago, or the newest. */
function sampleAt(age) {
  if (!history.length) return null;
  const now = history[history.length - 1].seconds;
  if (age === null) return history[history.length - 1];
  return history.reduce((best, one) =>
    Math.abs(now - one.seconds - age) < Math.abs(now - best.seconds - age) ? one : best);
}

function drawCharts() {
  const shown = sampleAt(cursor);
  if (!shown) return;
  const now = history[history.length - 1].seconds;
  const x = (one) => 300 * (1 - (now - one.seconds) / WINDOW_S);
  CHARTS.forEach((chart, number) => {
    const values = history.map((one) => one.values[number]);
    const top = (chart.top && chart.top(ranks[rank])) || Math.max(1e-9, ...values.filter((value) => value !== null));
    let path = "", area = "", open = null;
    history.forEach((one, index) => {
      const value = values[index];
      if (value === null) {
        if (open !== null) area += `V54H${open}Z`;
        open = null;
        return;
      }
      const point = `${x(one).toFixed(1)} ${(54 - 52 * Math.min(1, value / top)).toFixed(1)}`;
      path += (open === null ? "M" : "L") + point;
      area += open === null ? `M${x(one).toFixed(1)} 54L${point}` : `L${point}`;
      if (open === null) open = x(one).toFixed(1);
    });
    if (open !== null) area += `V54H${open}Z`;
    chart.curve.setAttribute("d", path);
    chart.area.setAttribute("d", area);
    chart.mark.setAttribute("d", cursor === null ? "" : `M${x(shown).toFixed(1)} 0V54`);
    chart.value.textContent = short(shown.values[number]);
    const ago = cursor === null ? "" : `${Math.round(now - shown.seconds)} s ago`;
    chart.scale.textContent = ago || (top > 1e-6 ? `max ${short(top)}` : "");
    chart.svg.setAttribute("aria-label", `${chart.name}: ${short(shown.values[number])} ${chart.unit} ${ago}`);
  });
}

function record(state) {
  if (before && state.seconds > before.seconds) {
    const seconds = state.seconds - before.seconds, change = {};
    // A count that fell was set to zero: what it says now has been counted since.
    for (const [name, value] of Object.entries(state.counts)) {
      change[name] = value < before.counts[name] ? value : value - before.counts[name];
    }
    history.push({ seconds: state.seconds, values: CHARTS.map((chart) => chart.of(change, seconds)) });
    while (state.seconds - history[0].seconds > WINDOW_S) history.shift();
  }
  before = state;
}

// -- the map -------------------------------------------------------------------------------------

const LEFT = 34, TOP = 20;
let cells = new Uint8Array(), size = { width: 8, height: 8 };

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/** Left edge, top edge, width and height of a cell in whole pixels, so that rows and columns fill the map. */
function placeOf(row, column) {
  const x = Math.round(column * size.width), y = row * size.height;
  return [LEFT + x, TOP + y, Math.round((column + 1) * size.width) - x - (size.width > 5 ? 1 : 0), size.height - 1];
}

function drawMap() {
  const state = ranks[rank], canvas = $("map");
  if (!state) return;
  const rows = state.layers.length, columns = state.experts, room = $("map-scroll").clientWidth - LEFT - 1;
  size.width = Math.max(3, Math.min(40, room / columns));
  size.height = Math.max(6, Math.min(20, Math.floor(Math.max(size.width, 520 / rows))));
  const width = Math.ceil(LEFT + columns * size.width) + 1, height = TOP + rows * size.height + 1;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const paint = canvas.getContext("2d"), colours = COLOURS.map(colour);
  paint.setTransform(scale, 0, 0, scale, 0, 0);
  paint.clearRect(0, 0, width, height);
  const empty = colour("--empty");
  cells.forEach((cell, number) => {
    const place = placeOf(Math.floor(number / columns), number % columns);
    const held = cell >> SCORE_BITS, score = Math.sqrt((cell & MOST_SCORE) / MOST_SCORE);
    paint.globalAlpha = 1;
    paint.fillStyle = empty;
    paint.fillRect(...place);
    paint.globalAlpha = held ? 0.3 + 0.7 * score : 0.55 * score;
    paint.fillStyle = colours[held];
    paint.fillRect(...place);
  });
  paint.globalAlpha = 1;
  paint.fillStyle = colour("--soft");
  paint.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  paint.textAlign = "right";
  paint.textBaseline = "middle";
  const every = Math.ceil(13 / size.height), across = [1, 2, 4, 8, 16, 32, 64].find((n) => n * size.width >= 34) || 64;
  for (let row = 0; row < rows; row += every) {
    paint.fillText(String(state.layers[row]), LEFT - 7, TOP + (row + 0.5) * size.height);
  }
  paint.textAlign = "left";
  for (let column = 0; column < columns; column += across) {
    paint.fillText(String(column), LEFT + column * size.width, TOP - 10);
  }
  const marked = hover ?? (document.activeElement === canvas ? at : null);
  if (marked) {
    paint.strokeStyle = colour("--ink");
    paint.lineWidth = 2;
    paint.strokeRect(...placeOf(...marked));
  }
  tell(marked);
}

function tell(marked) {
  const state = ranks[rank];
  let text = state.asleep ? "The engine sleeps; it has no slots." : "";
  if (marked) {
    const cell = cells[marked[0] * state.experts + marked[1]], score = Math.round(100 * (cell & MOST_SCORE) / MOST_SCORE);
    text = `Layer ${state.layers[marked[0]]}, expert ${marked[1]}: ${NAMES[cell >> SCORE_BITS]}, ` +
      `score ${score} % of its layer's largest.`;
  }
  if ($("cell").textContent !== text) $("cell").textContent = text;
}

function makeMap() {
  const canvas = $("map");
  canvas.addEventListener("pointermove", (event) => {
    const row = Math.floor((event.offsetY - TOP) / size.height), column = Math.floor((event.offsetX - LEFT) / size.width);
    const state = ranks[rank];
    hover = state && row >= 0 && column >= 0 && row < state.layers.length && column < state.experts ? [row, column] : null;
    drawMap();
  });
  canvas.addEventListener("pointerleave", () => { hover = null; drawMap(); });
  canvas.addEventListener("focus", () => { at = at ?? [0, 0]; drawMap(); });
  canvas.addEventListener("blur", drawMap);
  canvas.addEventListener("keydown", (event) => {
    const state = ranks[rank];
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!state || !move || !at) return;
    event.preventDefault();
    at = [Math.max(0, Math.min(state.layers.length - 1, at[0] + move[0])),
          Math.max(0, Math.min(state.experts - 1, at[1] + move[1]))];
    drawMap();
  });
  addEventListener("resize", drawMap);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

function drawLegend(state) {
  const total = state.layers.length * state.experts, legend = $("legend");
  const held = Object.values(state.resident).reduce((sum, count) => sum + count, 0);
  const entries = [];
  for (const name of ["high", "low"]) {
    if (name in state.resident) {
      entries.push([name, `${name}, ${state.precision[name]} bits: ${state.resident[name]} in ${state.slots[name]} slots`]);
    }
  }
  entries.push(["absent", `not on the device: ${total - held} of ${total}`]);
  const text = JSON.stringify(entries);
  if (legend.dataset.text === text) return;
  legend.dataset.text = text;
  legend.replaceChildren();
  for (const [name, said] of entries) {
    const item = element(legend, "li");
    element(item, "i", { class: name, "aria-hidden": "true" });
    item.append(said);
  }
}

// -- controls ------------------------------------------------------------------------------------

let controls = ""; // what the forms were made from

function drawControls(state) {
  const { high, low, stored_bits: stored, parameters, policy } = state.precision;
  const made = JSON.stringify([high, low, stored, parameters, policy]);
  if (made === controls || $("precision-form").contains(document.activeElement)) return;
  controls = made;
  const options = (select, values, chosen) => {
    select.replaceChildren();
    for (const value of values) {
      element(select, "option", { value }, value === 0 ? "skipped" : `${value} bits`).selected = value === chosen;
    }
    select.dataset.was = chosen;
  };
  options($("high"), stored, high);
  options($("low"), [...stored, 0], low);
  $("parameters").replaceChildren();
  for (const [name, { value, description = "", enum: choices, minimum, maximum }] of Object.entries(parameters)) {
    const label = element($("parameters"), "label", {}, name), about = { name, title: description };
    let input;
    if (choices) {
      input = element(label, "select", about);
      for (const choice of choices) element(input, "option", { value: choice }, choice).selected = choice === value;
    } else {
      input = element(label, "input", { ...about, type: "number", step: "any", min: minimum ?? "", max: maximum ?? "" });
      input.value = value;
    }
    input.dataset.was = value;
  }
}

function ask(path, body) {
  const headers = {}, key = sessionStorage.getItem("vllm-dymoe key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const signal = AbortSignal.timeout(PATIENCE_MS);
  return fetch(new URL(path, ROOT), { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
}

async function change(form, path, body) {
  const say = (text, bad) => { $("answer").textContent = text; $("answer").classList.toggle("bad", bad); };
  if (!Object.keys(body).length) return say("Nothing has been changed in the form.", false);
  const button = form.querySelector("button");
  button.disabled = true;
  say("Asking the server…", false);
  try {
    const answer = await ask(path, body), told = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(told.detail ?? told.error?.message ?? `The server answered ${answer.status}.`);
    const what = Object.entries(body).map(([name, value]) => `${name} is ${value} now`).join(", ");
    say(`${what}.`, false);
    form.reset();
    controls = "";
    button.blur();
  } catch (error) {
    say(error.name === "TimeoutError" ? "The server has not answered; it may still make the change." : error.message, true);
  }
  button.disabled = false;
}

function makeControls() {
  $("budget-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("budget").value.trim();
    change(event.target, "budget", { expert_budget: /^\d+$/.test(given) ? Number(given) : given });
  });
  $("precision-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const changed = {};
    for (const field of event.target.elements) {
      if (!field.name || field.value === field.dataset.was) continue;
      const number = field.type === "number" || field.name === "high" || field.name === "low";
      changed[field.name] = number ? Number(field.value) : field.value;
    }
    document.activeElement.blur();
    change(event.target, "precision", changed);
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("vllm-dymoe key", $("key").value);
    $("key-form").hidden = true;
    poll();
  });
  $("rank").addEventListener("change", () => {
    rank = Number($("rank").value);
    before = null;
    history = [];
    show();
  });
}

// -- the server ----------------------------------------------------------------------------------

function show() {
  const state = ranks[rank];
  cells = Uint8Array.from(atob(state.cells), (one) => one.charCodeAt(0));
  record(state);
  const { policy, high, low } = state.precision;
  $("about").textContent = `Policy ${policy}, high ${high} bits` + (low ? `, low ${low} bits` : "") +
    `, budget ${bytes(state.budget_bytes)}; all experts take ${bytes(state.all_bytes)}.`;
  if ($("rank").options.length !== ranks.length) {
    $("rank").replaceChildren();
    ranks.forEach((_, number) => element($("rank"), "option", { value: number }, String(number)));
    $("rank-choice").hidden = ranks.length < 2;
  }
  drawLegend(state);
  drawMap();
  drawCharts();
  drawControls(state);
}

function tellState(text, good) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = good ? "good" : "bad";
}

let waiting = null, asking = false;

async function poll() {
  if (asking) return;
  clearTimeout(waiting);
  asking = true;
  try {
    const answer = await ask("live");
    if (answer.status === 401) {
      sessionStorage.removeItem("vllm-dymoe key");
      $("key-form").hidden = false;
      $("key").focus();
      tellState("The server wants its API key.", false);
      return; // until the form is sent
    }
    if (!answer.ok) throw new Error(`The server answered ${answer.status}.`);
    ranks = (await answer.json()).ranks;
    rank = Math.min(rank, ranks.length - 1);
    show();
    tellState("live", true);
  } catch (error) {
    tellState(error instanceof TypeError || error.name === "TimeoutError" ? "The server does not answer." : error.message, false);
  } finally {
    asking = false;
  }
  if (!document.hidden) waiting = setTimeout(poll, PERIOD_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && $("key-form").hidden) poll(); });
makeCharts();
makeMap();
makeControls();
poll();
