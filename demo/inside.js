const KINDS = { reveal: "the ball is revealed", swap: "swap", cue: "the cue", letter: "letter" };
const EXAMPLES = { s5_generators: "s0 s0 s1 s0 s1 s2 s3 s2 s3 s1 s0 s3 s2 s2 s1 s0", z5: "g1 g3 g2 g4 g1 g1 g0 g2" };

const { tasks, policies } = props;
const form = find("form");
const status = find(".status");
const pages = find(".pages");
let start = 0;
let inside = null;

fillSelect(form.elements.task, Object.fromEntries(Object.entries(tasks).map(([name, task]) => [name, task.label])));
form.elements.text.value = EXAMPLES[form.elements.task.value];

// Fields of the other kind are not shown, and the models are those that there are for what is chosen.
function arrange() {
  const { kind, timing, task, model } = form.elements;
  for (const field of element.querySelectorAll(".of-episode")) field.hidden = kind.value !== "episode";
  for (const field of element.querySelectorAll(".of-word")) field.hidden = kind.value !== "word";
  const labels = kind.value === "episode" ? policies[timing.value] : tasks[task.value].models;
  const some = Object.keys(labels).length > 0;
  fillSelect(model, some ? labels : { "": "none is there" });
}

function request() {
  const { kind, timing, swaps, seed, task, text, model, head } = form.elements;
  const common = { model: model.value, head: head.value === "" ? null : head.valueAsNumber, start };
  if (kind.value === "word") return ["of_word", { ...common, task: task.value, text: text.value }];
  return ["of_episode", { ...common, timing: timing.value, swaps: swaps.valueAsNumber, seed: seed.valueAsNumber }];
}

async function look(from = 0) {
  start = from;
  const [name, given] = request();
  const missing = Object.entries(given).find(([, value]) => Number.isNaN(value));
  if (missing) return say(status, `Give a whole number for ${missing[0]}.`, true);
  try {
    inside = await ask(name, given);
  } catch (error) {
    return say(status, error.message, true);
  }
  form.elements.head.max = inside.heads;
  form.elements.head.value = inside.head;
  const unit = name === "of_word" ? "letters" : "frames";
  const title = form.elements.model.selectedOptions[0].textContent;
  say(status, `${title} over ${count(inside.length)} ${unit}, ${inside.heads} heads.`);
  pages.hidden = inside.stop - inside.start === inside.length;
  pages.querySelector("output").textContent = `${unit} ${count(inside.start + 1)} to ${count(inside.stop)}`;
  pages.querySelector('[data-go="-1"]').disabled = inside.start === 0;
  pages.querySelector('[data-go="1"]').disabled = inside.stop === inside.length;
  draw();
}

function draw() {
  if (!inside) return;
  const { heads, head, pairs, decay, phase, beta, cosines } = inside;
  const length = inside.stop - inside.start;
  const byHead = (row) => `head ${row + 1}`;
  const parts = [];
  if (beta) {
    parts.push(picture("Gate of the reflection, beta", "0 leaves the state alone, 1 erases a direction, 2 reflects it.", {
      data: unpack(beta), rows: heads, low: 0, high: 2, color: heat, rowName: byHead,
    }));
  }
  parts.push(picture("Decay", "What is kept of the state from one step to the next: 1 keeps all, 0 nothing.", {
    data: unpack(decay), rows: heads, low: 0, high: 1, color: heat, rowName: byHead,
  }));
  if (pairs) {
    parts.push(picture(`Phase, head ${head}`, "The angle that each pair of coordinates has been turned by, as a hue.", {
      data: unpack(phase), rows: pairs, low: -Math.PI, high: Math.PI, color: hue, rowName: (row) => `pair ${row + 1}`,
    }));
  }
  if (cosines) {
    parts.push(picture(`Cosine between reflections, head ${head}`,
      "Of the directions at any two positions: red alike, blue opposite, pale at right angles.", {
        data: unpack(cosines), rows: length, low: -1, high: 1, color: diverging, square: true,
        rowName: (row) => `${place(row)} against`,
      }));
  } else {
    parts.push(make("p", { class: "note" }, "This model has no reflection, and so neither beta nor directions to compare: its state is turned and fades, and no more."));
  }
  find(".pictures").replaceChildren(...parts);
}

const place = (column) => `${form.elements.kind.value === "word" ? "letter" : "frame"} ${count(inside.start + column + 1)}`;

// A picture with time from left to right; its pixels are numbers, and the pointer reads them.
function picture(title, text, { data, rows, low, high, color, rowName, square = false }) {
  const columns = inside.stop - inside.start;
  const canvas = make("canvas", { width: columns, height: rows, role: "img", "aria-label": `${title}. ${text}` });
  const pixels = new ImageData(columns, rows);
  const at = (row, column) => data[column * rows + row] / 255;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      pixels.data.set([...color(at(row, column)), 255], 4 * (row * columns + column));
    }
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  canvas.addEventListener("pointermove", (event) => {
    const column = Math.min(columns - 1, Math.floor((event.offsetX / canvas.clientWidth) * columns));
    const row = Math.min(rows - 1, Math.floor((event.offsetY / canvas.clientHeight) * rows));
    const value = low + (high - low) * at(row, column);
    find(".reading").textContent = `${title}: ${rowName(row)}, ${place(column)}${markAt(column)}: ${value.toFixed(2)}`;
  });
  const scale = make("div", { class: "scale" }, make("span", {}, low.toFixed(low % 1 ? 1 : 0)));
  const stops = Array.from({ length: 11 }, (_, i) => `rgb(${color(i / 10).join(" ")})`);
  const bar = make("span", { class: "bar" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  scale.append(bar, make("span", {}, high.toFixed(high % 1 ? 1 : 0)));
  const heading = make("figcaption", {}, make("b", {}, title), make("span", {}, text), scale);
  return make("figure", { class: square ? "square" : "" }, heading, marksStrip(), canvas);
}

function markAt(column) {
  const t = inside.start + column;
  const mark = inside.marks.find((one) => t >= one.start && t < one.start + one.frames);
  if (!mark) return "";
  if (mark.kind === "swap") return ` (cups ${mark.label + 1} and ${mark.label + 2} swap)`;
  if (mark.kind === "letter") return ` (${tasks[form.elements.task.value].letters[mark.label]})`;
  return ` (${KINDS[mark.kind]})`;
}

// What happens at each position, along the upper edge: letters and swaps by color, reveal and cue.
function marksStrip() {
  const length = inside.stop - inside.start;
  const strip = make("div", { class: "marks" });
  for (const { start: from, frames, kind, label } of inside.marks) {
    const left = Math.max(0, from - inside.start);
    const right = Math.min(length, from + frames - inside.start);
    if (right <= left) continue;
    const mark = make("span", { class: `mark ${kind} ${label === undefined ? "" : `point-${label}`}` });
    mark.style.left = `${(100 * left) / length}%`;
    mark.style.width = `${(100 * (right - left)) / length}%`;
    if ((right - left) / length > 0.02 && label !== undefined) {
      mark.textContent = kind === "swap" ? `${label + 1}·${label + 2}` : tasks[form.elements.task.value].letters[label];
    }
    strip.append(mark);
  }
  return strip;
}

// Colors of a number from 0 to 1.
const mix = (a, b, part) => a.map((x, i) => Math.round(x + (b[i] - x) * part));
function between(stops, part) {
  const at = part * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return mix(stops[i], stops[i + 1], at - i);
}
const heat = (part) => between([[16, 24, 48], [24, 84, 120], [36, 150, 140], [140, 200, 110], [250, 231, 120]], part);
const diverging = (part) => between([[32, 78, 168], [134, 175, 222], [240, 240, 238], [232, 150, 122], [170, 32, 44]], part);
function hue(part) {
  const wave = (shift) => Math.round(140 + 95 * Math.cos(2 * Math.PI * (part - shift)));
  return [wave(0), wave(1 / 3), wave(2 / 3)];
}

form.addEventListener("change", (event) => {
  const { name } = event.target;
  if (name === "task") form.elements.text.value = EXAMPLES[event.target.value];
  // Another model: its heads are others, and the one with the most to see is again to be found.
  if (["kind", "timing", "task", "model"].includes(name)) form.elements.head.value = "";
  arrange();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  look();
});
pages.addEventListener("click", (event) => {
  const by = Number(event.target.dataset.go);
  if (by) look(by > 0 ? inside.stop : Math.max(0, inside.start - (inside.stop - inside.start || 1)));
});
function lookAsAsked() {
  for (const [name, value] of Object.entries(document.lookInside)) {
    if (name !== "model") form.elements[name].value = value;
  }
  arrange();
  form.elements.model.value = document.lookInside.model;
  form.elements.head.value = "";
  look();
}
document.addEventListener("look-inside", lookAsAsked);
arrange();
if (document.lookInside) lookAsAsked();
else if (Object.keys(policies.fixed).length) look();
