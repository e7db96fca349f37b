"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const MODELS = DATA.models, MAIN = MODELS[0], $ = (id) => document.getElementById(id);
const PARTS = { distance: "distance", direction: "direction", bias: "distance", semantics: "content", scores: "sum", attention: "attention" };
const ARROW = 6; // patches that an arrow is long for a push of one unit of score per patch
const own = { image: null }; // what the user dropped
const state = readState();

// --- the worker ---------------------------------------------------------------------------------------------------
const worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent], { type: "text/javascript" })));
const waiting = new Map();
let requests = 0;
worker.onmessage = ({ data }) => {
  const { resolve, reject } = waiting.get(data.id);
  waiting.delete(data.id);
  if (data.error) reject(new Error(data.error)); else resolve(data);
};
const ask = (what, more = {}) => new Promise((resolve, reject) => {
  const id = ++requests;
  waiting.set(id, { resolve, reject });
  worker.postMessage({ id, what, ...more });
});

// --- state, kept in the address -----------------------------------------------------------------------------------
function bestHead() {
  let best = [0, 0];
  (MAIN.positional || []).forEach((row, l) => row.forEach((z, h) => { if (z > MAIN.positional[best[0]][best[1]]) best = [l, h]; }));
  return best;
}
function readState() {
  const given = new URLSearchParams(location.hash.slice(1)), [layer, head] = bestHead();
  const number = (key, low, high, otherwise) => {
    const value = given.has(key) ? Number(given.get(key)) : NaN;
    return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : otherwise;
  };
  const form = (given.get("form") || "").split(",").map(Number);
  const dark = window.matchMedia && matchMedia("(prefers-color-scheme: dark)").matches;
  return {
    image: Math.round(number("image", 0, DATA.samples.length - 1, 0)),
    size: Math.round(number("size", MAIN.trained, MAIN.trained * DATA.largest, MAIN.trained) / MAIN.patch) * MAIN.patch,
    interpolate: number("interpolate", 0, 1, 0) >= 0.5,
    layer: Math.round(number("layer", 1, MAIN.layers.length, layer + 1)) - 1,
    head: Math.round(number("head", 1, MAIN.heads, head + 1)) - 1,
    x: number("x", 0, 0.9999, 0.45), y: number("y", 0, 0.9999, 0.45),
    form: form.length === 5 && form.every(Number.isFinite) ? form : null,
    invert: number("invert", 0, 1, 0) >= 0.5,
    theme: ["light", "dark"].includes(given.get("theme")) ? given.get("theme") : dark ? "dark" : "light",
  };
}
function writeState() {
  const words = { image: state.image, size: state.size, interpolate: +state.interpolate, layer: state.layer + 1, head: state.head + 1,
    x: state.x.toFixed(4), y: state.y.toFixed(4), invert: +state.invert, theme: state.theme };
  if (state.form) words.form = state.form.map((v) => v.toPrecision(5)).join(",");
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}
const grid = () => state.size / MAIN.patch;
const scaleOf = () => (state.interpolate ? MAIN.trained / state.size : 1);
const cell = () => ({ col: Math.floor(state.x * grid()), row: Math.floor(state.y * grid()) });

// --- images ---------------------------------------------------------------------------------------------------------
const sources = DATA.samples.map(() => null); // {pixels (3, side, side) in [0, 1], side}
function pixelsOf(bitmap, width, height) { // the middle square
  const side = Math.min(width, height), most = Math.min(side, 1024), canvas = document.createElement("canvas");
  canvas.width = canvas.height = most;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, (width - side) / 2, (height - side) / 2, side, side, 0, 0, most, most);
  const bytes = context.getImageData(0, 0, most, most).data, pixels = new Float32Array(3 * most * most);
  for (let i = 0; i < most * most; i++) for (let c = 0; c < 3; c++) pixels[c * most * most + i] = bytes[4 * i + c] / 255;
  return { pixels, side: most };
}
function decode(url) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => resolve(pixelsOf(image, image.naturalWidth, image.naturalHeight));
    image.onerror = () => reject(new Error("this file is no image that the browser can read"));
    image.src = url;
  });
}
async function source() {
  if (own.image) return own.image;
  return (sources[state.image] ||= await decode(`data:image/png;base64,${DATA.samples[state.image].png}`));
}
async function take(file) {
  const url = URL.createObjectURL(file);
  try { own.image = await decode(url); state.form = null; refresh(); } catch (error) { say(error.message); } finally { URL.revokeObjectURL(url); }
}
async function current() {
  const { pixels, side } = await source(), image = resize(pixels, side, side, state.size, state.size);
  if (state.invert) for (let i = 0; i < image.length; i++) image[i] = 1 - image[i];
  return image;
}

// --- drawing --------------------------------------------------------------------------------------------------------
const WARM = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];
function warm(t) {
  const place = Math.min(0.9999, Math.max(0, t)) * (WARM.length - 1), i = Math.floor(place), f = place - i;
  return WARM[i].map((v, c) => v + f * (WARM[i + 1][c] - v));
}
function signed(t) { // blue below zero, orange above
  const middle = state.theme === "dark" ? [30, 32, 35] : [255, 255, 255], end = t < 0 ? [33, 102, 172] : [213, 94, 0];
  return middle.map((v, c) => v + Math.min(1, Math.abs(t)) * (end[c] - v));
}
function paint(canvas, values, side, kind) {
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"), image = context.createImageData(side, side);
  const finite = Array.from(values).filter(Number.isFinite), most = Math.max(1e-9, ...finite.map(Math.abs)), top = Math.max(1e-12, ...finite);
  for (let i = 0; i < side * side; i++) {
    const hidden = !Number.isFinite(values[i]);
    const colour = hidden ? [128, 128, 128] : kind === "attention" ? warm(Math.sqrt(values[i] / top)) : signed(Math.sign(values[i]) * Math.sqrt(Math.abs(values[i]) / most));
    image.data.set([...colour, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  canvas.dataset.sum = finite.reduce((a, b) => a + b, 0).toPrecision(6);
  return most;
}
let drawn = { image: null, form: null };
function paintImage() {
  const canvas = $("image"), context = canvas.getContext("2d"), side = canvas.width, { image } = drawn;
  if (!image) return;
  const small = document.createElement("canvas"), n = state.size;
  small.width = small.height = n;
  const data = small.getContext("2d").createImageData(n, n);
  for (let i = 0; i < n * n; i++) data.data.set([0, 1, 2].map((c) => 255 * image[c * n * n + i]).concat(255), 4 * i);
  small.getContext("2d").putImageData(data, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, side, side);
  const patch = side / grid(), { row, col } = cell();
  context.strokeStyle = "rgba(128,128,128,0.35)";
  context.lineWidth = 1;
  for (let i = 1; i < grid(); i++) {
    context.beginPath(); context.moveTo(i * patch, 0); context.lineTo(i * patch, side); context.moveTo(0, i * patch); context.lineTo(side, i * patch); context.stroke();
  }
  context.strokeStyle = "#ff7a1a"; context.lineWidth = 4;
  context.strokeRect(col * patch, row * patch, patch, patch);
  if (drawn.form) paintForm(context, drawn.form, (col + 0.5) * patch, (row + 0.5) * patch, patch);
}

// --- the parabola of the query: an ellipse, an arrow, a cross ---------------------------------------------------------
const factor = () => MAIN.layers[state.layer].scale;
function shape([xx, xy, yy, gx, gy]) { // half axes in patches of the image where distance costs one unit, and the push
  const f = factor(), s = scaleOf(), a = -xx * f * s * s, b = -xy * f * s * s, c = -yy * f * s * s;
  const mean = (a + c) / 2, gap = Math.hypot((a - c) / 2, b), angle = 0.5 * Math.atan2(2 * b, a - c);
  const radius = (v) => 1 / Math.sqrt(Math.max(v, 1e-6));
  return { near: radius(mean + gap), far: radius(mean - gap), angle, gx: gx * f * s, gy: gy * f * s };
}
function unshape({ near, far, angle, gx, gy }) {
  const f = factor(), s = scaleOf(), big = 1 / near ** 2, small = 1 / far ** 2, cos = Math.cos(angle), sin = Math.sin(angle);
  const k = -1 / (f * s * s);
  return [k * (big * cos * cos + small * sin * sin), k * (big - small) * cos * sin, k * (big * sin * sin + small * cos * cos), gx / (f * s), gy / (f * s)];
}
function handles(form, x, y, patch) {
  const { near, far, angle, gx, gy } = shape(form), reach = 0.46 * $("image").width;
  const at = (length, turn) => [x + Math.min(reach, length * patch) * Math.cos(turn), y + Math.min(reach, length * patch) * Math.sin(turn)];
  const push = Math.hypot(gx, gy) * ARROW;
  return { near: at(near, angle), far: at(far, angle + Math.PI / 2), push: at(push, Math.atan2(gy, gx)) };
}
function paintForm(context, form, x, y, patch) {
  const { near, far, angle, gx, gy } = shape(form), points = handles(form, x, y, patch), side = $("image").width;
  for (const [width, colour] of [[5, "rgba(0,0,0,0.55)"], [2.5, state.form ? "#ffd23c" : "#5fd0ff"]]) {
    context.lineWidth = width; context.strokeStyle = colour;
    context.beginPath(); context.ellipse(x, y, Math.min(near * patch, 4 * side), Math.min(far * patch, 4 * side), angle, 0, 2 * Math.PI); context.stroke();
    context.beginPath(); context.moveTo(x, y); context.lineTo(...points.push); context.stroke();
  }
  const big = 1 / near ** 2, small = 1 / far ** 2, cos = Math.cos(angle), sin = Math.sin(angle);
  const u = (gx * cos + gy * sin) / (2 * big), v = (gy * cos - gx * sin) / (2 * small);
  const px = x + (u * cos - v * sin) * patch, py = y + (u * sin + v * cos) * patch;
  context.lineWidth = 3; context.strokeStyle = "#ff4fa3";
  context.beginPath(); context.moveTo(px - 6, py - 6); context.lineTo(px + 6, py + 6); context.moveTo(px - 6, py + 6); context.lineTo(px + 6, py - 6); context.stroke();
  for (const [hx, hy] of Object.values(points)) {
    context.beginPath(); context.arc(hx, hy, 7, 0, 2 * Math.PI);
    context.fillStyle = state.form ? "#ffd23c" : "#5fd0ff"; context.fill(); context.lineWidth = 2; context.strokeStyle = "#111"; context.stroke();
  }
}
const SLIDERS = { near: ["half axis 1, patches", 0.3, 40, true], far: ["half axis 2, patches", 0.3, 40, true], angle: ["tilt, degrees", -90, 90, false], gx: ["push to the right", -4, 4, false], gy: ["push down", -4, 4, false] };
function makeSliders() {
  for (const [key, [name, low, high, isLog]] of Object.entries(SLIDERS)) {
    const label = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
    label.textContent = name; label.htmlFor = input.id = `slider-${key}`; input.type = "range"; input.step = "any";
    input.min = isLog ? Math.log(low) : low; input.max = isLog ? Math.log(high) : high;
    output.id = `value-${key}`;
    input.oninput = () => {
      const value = isLog ? Math.exp(+input.value) : key === "angle" ? (+input.value * Math.PI) / 180 : +input.value;
      state.form = unshape({ ...shape(drawn.form), [key]: value });
      refresh();
    };
    $("sliders").append(label, input, output);
  }
}
function showSliders() {
  if (!drawn.form) return;
  const now = shape(drawn.form);
  for (const [key, [, , , isLog]] of Object.entries(SLIDERS)) {
    let value = key === "angle" ? (now.angle * 180) / Math.PI : now[key];
    $(`value-${key}`).textContent = value.toFixed(key === "angle" ? 0 : 2);
    if (document.activeElement !== $(`slider-${key}`)) $(`slider-${key}`).value = isLog ? Math.log(value) : value;
  }
  $("reset").disabled = !state.form;
}

// --- the panels of the models ---------------------------------------------------------------------------------------
const panels = MODELS.map((model) => {
  const box = document.createElement("article");
  box.className = "model";
  const names = ["distance", "direction", "bias", "semantics", "scores", "attention"].filter((name) =>
    name === "bias" ? model.layers[0].bias : ["distance", "direction"].includes(name) ? model.layers[0].form : name === "semantics" ? model.layers[0].form || model.layers[0].bias : true);
  const captions = { ...PARTS, scores: names.includes("semantics") ? "sum" : "content and position" };
  box.innerHTML = `<header><h2></h2><span class="where"></span></header><div class="bars" aria-label="Prediction"></div><div class="parts"></div>
    <details open><summary>All heads, for this query${model.positional ? ", the most positional first" : ""}</summary><div class="heads"></div></details>`;
  box.querySelector("h2").textContent = model.label;
  box.querySelector("h2").style.color = model.colour;
  const canvases = {};
  names.forEach((name, i) => {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas"), caption = document.createElement("figcaption");
    canvas.className = name; canvas.setAttribute("role", "img"); caption.textContent = captions[name];
    figure.append(canvas, caption); canvases[name] = { canvas, caption };
    if (i) { const sign = document.createElement("span"); sign.className = "sign"; sign.textContent = name === "scores" ? "=" : name === "attention" ? "→" : "+"; box.querySelector(".parts").append(sign); }
    box.querySelector(".parts").append(figure);
  });
  const order = model.layers.flatMap((_, layer) => Array.from({ length: model.heads }, (_, head) => ({ layer, head })));
  if (model.positional) order.sort((a, b) => model.positional[b.layer][b.head] - model.positional[a.layer][a.head]);
  const buttons = order.map(({ layer, head }) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    button.type = "button"; button.append(canvas, document.createTextNode(`${layer + 1}.${head + 1}${model.positional ? ` ${model.positional[layer][head].toFixed(2)}` : ""}`));
    button.title = `layer ${layer + 1}, head ${head + 1}`;
    button.onclick = () => { state.layer = layer; state.head = head; state.form = null; refresh(); };
    box.querySelector(".heads").append(button);
    return { button, canvas, layer, head };
  });
  $("right").append(box);
  return { box, canvases, captions, buttons, order };
});
function showPrediction(panel, model, logits) {
  const most = Math.max(...logits), weights = logits.map((v) => Math.exp(v - most)), total = weights.reduce((a, b) => a + b, 0);
  const best = weights.map((w, i) => ({ name: model.classes[i], share: w / total })).sort((a, b) => b.share - a.share).slice(0, 4);
  const bars = panel.box.querySelector(".bars");
  bars.replaceChildren();
  for (const { name, share } of best) {
    const label = document.createElement("b"), bar = document.createElement("div"), fill = document.createElement("i"), value = document.createElement("span");
    label.textContent = name; bar.className = "bar"; fill.style.width = `${100 * share}%`; fill.style.background = model.colour; value.textContent = `${(100 * share).toFixed(1)}%`;
    bar.append(fill); bars.append(label, bar, value);
  }
  panel.prediction = best[0];
  panel.logits = logits;
}

// --- one refresh at a time; what changes meanwhile is drawn next ------------------------------------------------------
let busy = false, again = false, settled = Promise.resolve();
function refresh() {
  writeState();
  if (busy) { again = true; return settled; }
  busy = true;
  settled = (async () => {
    do { again = false; await draw(); } while (again);
  })().catch((error) => say(String(error))).finally(() => { busy = false; });
  return settled;
}
const say = (text) => { $("status").textContent = text; };
async function draw() {
  document.documentElement.dataset.theme = state.theme;
  const image = await current(), n = grid(), { row, col } = cell(), query = row * n + col;
  drawn.image = image;
  $("size").value = state.size; $("invert").checked = state.invert;
  $("sizeText").textContent = `${state.size} px, ${(state.size / MAIN.trained).toFixed(2).replace(/\.?0+$/, "")}x, ${n * n} patches`;
  document.querySelectorAll("[name=positions]").forEach((input) => { input.checked = +input.value === +state.interpolate; });
  [...$("samples").children].forEach((button, i) => button.setAttribute("aria-pressed", String(!own.image && i === state.image)));
  say("computing");
  for (const [index, model] of MODELS.entries()) {
    const panel = panels[index];
    const { logits } = await ask("run", { model: index, image, height: state.size, width: state.size, scale: scaleOf() });
    showPrediction(panel, model, logits);
    const layer = Math.min(state.layer, model.layers.length - 1), head = Math.min(state.head, model.heads - 1);
    const form = index === 0 && model.layers[0].form ? state.form : null;
    const parts = await ask("look", { model: index, layer, head, query, form });
    panel.box.querySelector(".where").textContent = `layer ${layer + 1}, head ${head + 1}`;
    for (const [name, { canvas, caption }] of Object.entries(panel.canvases)) {
      const values = parts[name].slice(parts.first), most = paint(canvas, values, n, name);
      caption.textContent = name === "attention" ? `${panel.captions[name]}, ≤ ${Math.max(...values).toFixed(3)}` : `${panel.captions[name]}, ±${most.toFixed(1)}`;
      canvas.setAttribute("aria-label", `${model.label}: ${caption.textContent}`);
    }
    if (index === 0) { drawn.form = parts.form; $("form").hidden = !parts.form; showSliders(); paintImage(); }
    const { maps } = await ask("heads", { model: index, query });
    for (const { button, canvas, layer: l, head: h } of panel.buttons) {
      paint(canvas, maps[l][h].slice(parts.first), n, "attention");
      button.setAttribute("aria-pressed", String(l === layer && h === head));
    }
  }
  say(MODELS.map((model, i) => `${model.label}: ${panels[i].prediction.name}`).join(", "));
}

// --- what people do ---------------------------------------------------------------------------------------------------
function place(event) {
  const box = $("image").getBoundingClientRect(), f = (v, size) => Math.min(0.9999, Math.max(0, v / size));
  return { x: f(event.clientX - box.left, box.width), y: f(event.clientY - box.top, box.height) };
}
let dragging = "";
$("image").onpointerdown = (event) => {
  const { x, y } = place(event), side = $("image").width, patch = side / grid(), { row, col } = cell();
  dragging = "query";
  if (drawn.form) {
    const points = handles(drawn.form, (col + 0.5) * patch, (row + 0.5) * patch, patch);
    for (const [name, [hx, hy]] of Object.entries(points)) if (Math.hypot(x * side - hx, y * side - hy) < 16) dragging = name;
  }
  $("image").setPointerCapture(event.pointerId);
  $("image").onpointermove(event);
};
$("image").onpointermove = (event) => {
  if (!dragging) return;
  const { x, y } = place(event), { row, col } = cell();
  if (dragging === "query") Object.assign(state, { x, y, form: null });
  else {
    const now = shape(drawn.form), dx = x * grid() - (col + 0.5), dy = y * grid() - (row + 0.5), length = Math.max(0.3, Math.hypot(dx, dy)), turn = Math.atan2(dy, dx);
    if (dragging === "push") Object.assign(now, { gx: dx / ARROW, gy: dy / ARROW });
    else if (dragging === "near") Object.assign(now, { near: length, angle: turn });
    else Object.assign(now, { far: length, angle: turn - Math.PI / 2 });
    state.form = unshape(now);
  }
  refresh();
};
$("image").onpointerup = $("image").onpointercancel = () => { dragging = ""; };
function setSize(size) { state.size = Math.min(MAIN.trained * DATA.largest, Math.max(MAIN.trained, size)); state.form = null; refresh(); }
function step(dx, dy) {
  const n = grid(), { row, col } = cell(), inside = (v) => (Math.min(n - 1, Math.max(0, v)) + 0.5) / n;
  Object.assign(state, { x: inside(col + dx), y: inside(row + dy), form: null });
  refresh();
}
function nextHead(by) {
  const { order } = panels[0], now = order.findIndex(({ layer, head }) => layer === state.layer && head === state.head);
  Object.assign(state, order[(now + by + order.length) % order.length], { form: null });
  refresh();
}
const keys = {
  ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
  "[": () => nextHead(-1), "]": () => nextHead(1), "-": () => setSize(state.size - MAIN.patch), "+": () => setSize(state.size + MAIN.patch),
  i: () => { state.interpolate = !state.interpolate; state.form = null; refresh(); },
};
$("image").onkeydown = (event) => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } };
Object.assign($("size"), { min: MAIN.trained, max: MAIN.trained * DATA.largest, step: MAIN.patch, oninput: () => setSize(+$("size").value) });
document.querySelectorAll("[name=positions]").forEach((input) => { input.onchange = () => { state.interpolate = input.value === "1"; state.form = null; refresh(); }; });
$("invert").onchange = () => { state.invert = $("invert").checked; state.form = null; refresh(); };
$("reset").onclick = () => { state.form = null; refresh(); };
$("theme").onclick = () => { state.theme = state.theme === "dark" ? "light" : "dark"; refresh(); };
$("file").onchange = () => { if ($("file").files[0]) take($("file").files[0]); };
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); });
addEventListener("hashchange", () => { Object.assign(state, readState()); refresh(); });

// Everything in view as one picture.
function picture() {
  const out = document.createElement("canvas"), context = out.getContext("2d"), style = getComputedStyle(document.documentElement), size = 150;
  const most = Math.max(...panels.map(({ canvases }) => Object.keys(canvases).length));
  out.width = 520 + most * (size + 10); out.height = Math.max(560, 40 + panels.length * (size + 110));
  context.fillStyle = style.getPropertyValue("--back"); context.fillRect(0, 0, out.width, out.height);
  context.drawImage($("image"), 20, 40, 480, 480);
  context.imageSmoothingEnabled = false; context.font = "15px system-ui, sans-serif";
  const write = (text, x, y, colour) => { context.fillStyle = colour || style.getPropertyValue("--ink"); context.fillText(text, x, y); };
  write(`${state.size} px (${(state.size / MAIN.trained).toFixed(2)}x), positions ${state.interpolate ? "interpolated" : "as they are"}`, 20, 26);
  panels.forEach(({ canvases, prediction, box }, index) => {
    const y = 60 + index * (size + 110);
    write(`${MODELS[index].label}, ${box.querySelector(".where").textContent}: ${prediction.name} (${(100 * prediction.share).toFixed(1)}%)`, 520, y, MODELS[index].colour);
    Object.values(canvases).forEach(({ canvas, caption }, i) => {
      context.drawImage(canvas, 520 + i * (size + 10), y + 14, size, size);
      write(caption.textContent, 520 + i * (size + 10), y + size + 34);
    });
  });
  return out;
}
$("save").onclick = () => {
  const link = document.createElement("a");
  link.download = `parapos-${MAIN.encoding}-${state.size}px.png`; link.href = picture().toDataURL("image/png"); link.click();
};

DATA.samples.forEach(({ label, png }, i) => {
  const button = document.createElement("button"), image = document.createElement("img");
  button.type = "button"; image.src = `data:image/png;base64,${png}`; image.alt = `image ${i + 1}, class ${label}`; button.append(image);
  button.onclick = () => { own.image = null; state.image = i; state.form = null; refresh(); };
  $("samples").append(button);
});
makeSliders();
// For tests, and for those who want the numbers: the state, what is asked of the worker, and the picture.
window.explorer = { state, ask, picture, panels, refresh, settled: () => settled, resize, take };
ask("load", { models: MODELS }).then(refresh);
