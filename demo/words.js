const STEP = 40; // of a letter, in units of the picture
const GAP = 26; // between places
const LONGEST_TYPED = 400; // letters; a longer word is not written out
const EXAMPLES = { s5_generators: "s0 s1 s0 s2 s3 s1 s2 s0 s3 s3", z5: "g1 g3 g2 g4 g1 g1" };

const tasks = props.tasks;
const form = find("form");
const status = find(".status");
const lookButton = find(".look");
let task = Object.keys(tasks)[0];
let word = null; // as followed: numbers of letters and arrangements, unpacked
let first = 0; // the first letter that is shown
let asked = 0;

for (const [name, { label }] of Object.entries(tasks)) {
  const choice = make("input", { type: "radio", name: "task", value: name });
  choice.checked = name === task;
  choice.addEventListener("change", () => chooseTask(name));
  find(".tasks").append(make("label", {}, choice, make("span", {}, label)));
}

function chooseTask(name) {
  task = name;
  form.elements.word.value = EXAMPLES[name];
  const { letters, moves } = tasks[name];
  find(".letters").replaceChildren(
    ...letters.map((letter, number) => {
      const button = make("button", { type: "button", title: describeMove(moves[number]) }, `+ ${letter}`);
      button.addEventListener("click", () => addLetter(number));
      return button;
    }),
  );
  follow({ task, text: form.elements.word.value });
}

function describeMove(move) {
  const moved = move.flatMap((point, place) => (point === place ? [] : [place + 1]));
  if (moved.length === 0) return "nothing moves";
  return moved.length === 2 ? `places ${moved.join(" and ")} swap` : "all move round";
}

function addLetter(number) {
  const typed = form.elements.word;
  typed.value = `${typed.value.trim()} ${tasks[task].letters[number]}`.trim();
  follow({ task, text: typed.value }, true);
}

async function follow(request, showEnd = false) {
  const own = ++asked;
  const typed = form.elements.word.value;
  const slow = setTimeout(() => say(status, "The models are reading …"), 150);
  try {
    const answer = await ask("follow", request);
    if (own === asked) show(answer, showEnd, typed);
  } catch (error) {
    if (own === asked) say(status, error.message, true);
  } finally {
    clearTimeout(slow);
  }
}

// `typed` is what stood in the form when it was asked for; what was typed since then stays.
function show(answer, showEnd, typed) {
  word = { ...answer, letters: unpack(answer.letters), truth: unpack(answer.truth) };
  word.models = answer.models.map((model) => ({ ...model, predicted: unpack(model.predicted) }));
  first = showEnd ? Math.max(0, word.length - shown()) : 0;
  const names = tasks[word.task].letters;
  const written = word.length <= LONGEST_TYPED;
  const text = written ? [...word.letters].map((letter) => names[letter]).join(" ") : "";
  if (form.elements.word.value === typed) form.elements.word.value = text;
  form.elements.word.placeholder = written ? "" : "too long to write out";
  const trained = tasks[word.task].trained;
  const many = `${count(word.length)} ${word.length === 1 ? "letter" : "letters"}`;
  const none = word.models.length ? "" : " There is no trained model for these letters yet, only the truth.";
  say(status, `${many}; models were trained on words of ${trained}.${none}`);
  lookButton.hidden = !(written && word.models.length);
  lookButton.onclick = () =>
    lookInside({ kind: "word", task: word.task, text, model: word.models[0].name });
  draw();
}

const shown = () => Math.max(6, Math.min(32, Math.floor(find(".braids").clientWidth / 30) - 1));

function go(where) {
  if (!word) return;
  const last = Math.max(0, word.length - shown());
  const to = { first: 0, back: first - shown(), on: first + shown(), last }[where] ?? where;
  first = Math.max(0, Math.min(last, to));
  draw();
}

function draw() {
  if (!word || !element.offsetParent) return;
  const stop = Math.min(word.length, first + shown());
  find(".pages output").textContent = `letters ${count(first + 1)} to ${count(stop)}`;
  for (const button of element.querySelectorAll(".pages button")) {
    const back = ["first", "back"].includes(button.dataset.go);
    button.disabled = back ? first === 0 : stop === word.length;
  }
  const rows = [braidRow("truth", "True arrangement", "", word.truth, null)];
  for (const model of word.models) rows.push(modelRow(model));
  find(".braids").replaceChildren(...rows);
  for (const strip of element.querySelectorAll("canvas.strip")) drawStrip(strip);
}

function modelRow(model) {
  const share = percent(model.right / word.length);
  const lost = model.first_wrong;
  const verdict = lost === null ? `right after each of ${count(word.length)} letters` : `${share} right, first wrong at `;
  const row = braidRow(`player-${model.name}`, model.label, verdict, model.predicted, word.truth);
  row.dataset.model = model.name;
  if (lost !== null) {
    const button = make("button", { type: "button", class: "link" }, `letter ${count(lost + 1)}`);
    button.addEventListener("click", () => go(lost - Math.floor(shown() / 2)));
    row.querySelector(".verdict").append(button);
  }
  if (word.length <= shown()) return row; // all of it is seen above
  const strip = make("canvas", { class: "strip", height: 14, title: "Where it is right, over the whole word" });
  strip.wrong = model.predicted.map((element, t) => (element === word.truth[t] ? 0 : 1));
  strip.addEventListener("click", (event) => {
    const part = event.offsetX / strip.clientWidth;
    go(Math.floor(part * word.length) - Math.floor(shown() / 2));
  });
  row.append(strip);
  return row;
}

// Strands from arrangement to arrangement; where they are not those of `truth`, the letter is marked.
function braidRow(kind, label, verdict, elements, truth) {
  const names = tasks[word.task].letters;
  const pointsOf = tasks[word.task].arrangements;
  const letters = [...word.letters.slice(first, first + shown())];
  const before = first === 0 ? pointsOf[0] : pointsOf[elements[first - 1]];
  const columns = [before, ...letters.map((_, i) => pointsOf[elements[first + i]])];
  const svg = make("svg", { viewBox: `0 0 ${STEP * (letters.length + 1)} ${GAP * 5 + 22}`, class: "braid", preserveAspectRatio: "xMinYMid" });
  letters.forEach((letter, i) => {
    const wrong = truth && elements[first + i] !== truth[first + i];
    const at = { x: STEP * (i + 0.5) + 20, y: 20, width: STEP, height: GAP * 5 + 2 };
    if (wrong) svg.append(make("rect", { class: "wrong", ...at }));
    const name = make("text", { class: "letter", x: STEP * (i + 1), y: 14 });
    name.textContent = names[letter];
    svg.append(name);
  });
  for (let point = 0; point < 5; point++) svg.append(strand(columns, point));
  columns.forEach((points, i) => {
    points.forEach((point, place) => {
      const number = make("text", { class: "point", x: STEP * i + 20, y: height(place) + 4 });
      number.textContent = point + 1;
      svg.append(make("circle", { class: `point-${point}`, cx: STEP * i + 20, cy: height(place), r: 10 }), number);
    });
  });
  if (truth === null && word.task === "s5_generators") drawable(svg);
  const heading = make("p", { class: "name" }, make("span", { class: "dot" }), make("b", {}, label));
  heading.append(make("span", { class: "verdict" }, verdict));
  return make("section", { class: `braid-row ${kind}` }, heading, svg);
}

const height = (place) => 36 + GAP * place;

function strand(columns, point) {
  const path = columns.map((points, i) => {
    const [x, y] = [STEP * i + 20, height(points.indexOf(point))];
    if (i === 0) return `M ${x} ${y}`;
    const from = height(columns[i - 1].indexOf(point));
    return `C ${x - STEP / 2} ${from} ${x - STEP / 2} ${y} ${x} ${y}`;
  });
  return make("path", { class: `strand point-${point}`, d: path.join(" ") });
}

// A click between two strands adds the swap of these places.
function drawable(svg) {
  svg.classList.add("drawable");
  svg.addEventListener("click", (event) => {
    const scale = svg.viewBox.baseVal.height / svg.clientHeight;
    const gap = Math.floor((event.offsetY * scale - height(0)) / GAP);
    if (gap >= 0 && gap < 4 && word.length < LONGEST_TYPED) addLetter(gap);
  });
}

// The share of wrong letters in each column of pixels, and the part that is shown above.
function drawStrip(strip) {
  const width = (strip.width = Math.max(1, Math.min(strip.clientWidth || 300, word.length)));
  const context = strip.getContext("2d");
  const style = getComputedStyle(strip);
  for (let x = 0; x < width; x++) {
    const part = strip.wrong.slice(Math.floor((x * word.length) / width), Math.floor(((x + 1) * word.length) / width));
    const wrong = part.reduce((sum, one) => sum + one, 0) / part.length;
    context.fillStyle = style.getPropertyValue("--right");
    context.fillRect(x, 0, 1, strip.height);
    context.globalAlpha = wrong && Math.max(0.4, wrong); // a single wrong letter is seen too
    context.fillStyle = style.getPropertyValue("--wrong");
    context.fillRect(x, 0, 1, strip.height);
    context.globalAlpha = 1;
  }
  if (word.length > shown()) {
    context.fillStyle = style.getPropertyValue("--ink");
    const [from, part] = [(first * width) / word.length, (shown() * width) / word.length];
    context.fillRect(from, 0, Math.max(2, part), 3);
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  follow({ task, text: form.elements.word.value });
});
find(".random").addEventListener("click", () => {
  const length = form.elements.size.valueAsNumber;
  if (Number.isNaN(length)) return say(status, "Give a number of letters from 1 to 100,000.", true);
  follow({ task, length });
});
find(".pages").addEventListener("click", (event) => {
  if (event.target.dataset.go) go(event.target.dataset.go);
});
// Also when the tab is first shown, which has no width before.
new ResizeObserver(() => draw()).observe(element);
chooseTask(task);
