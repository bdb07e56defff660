const REVEAL_SECONDS = 1.6; // five frames are too short for people
const REACH_FRAMES_PER_SECOND = 20;
const LONGEST_STEP = 0.1; // seconds between two pictures
const FLOOR = 300;
const LIFT = 300; // a cup's height of 0.5 is 150 units of the picture
const REVEALED_HEIGHT = 0.42;

const form = find("form");
const stage = find("svg");
const status = find(".status");
const startButton = find(".main");
const lookButton = find(".look");
const scores = new Map([["you", newScore("You")], ["chance", newScore("Chance")]]);
for (const [name, label] of Object.entries(props.policies.fixed)) scores.set(name, newScore(label));
let game = null;
let phase = "idle"; // then watching, choosing, reaching, and idle again
let run = 0; // of the animation: an older one ends itself

function newScore(label) {
  return { label, right: 0, games: 0, last: "" };
}

// Where a slot is, from -1 to 1, and in the picture.
const slotPosition = (slot) => slot / 2 - 1;
const across = (position) => 500 + 400 * position;

// The five cups at a time, counted in frames: [position, height] each, by the slot that they have left or are in.
function cupsAt(moves, time) {
  const cups = Array.from({ length: 5 }, (_, slot) => [slotPosition(slot), 0]);
  const move = moves.find((one) => time > one.start - 1 && time < one.start - 1 + one.frames);
  if (move) {
    const part = (time - move.start + 1) / move.frames;
    const moved = (1 - Math.cos(Math.PI * part)) / 4;
    const height = 0.5 * Math.sin(Math.PI * part);
    cups[move.left] = [slotPosition(move.left) + moved, move.lifted === 0 ? height : 0];
    cups[move.left + 1] = [slotPosition(move.left + 1) - moved, move.lifted === 1 ? height : 0];
  }
  return cups;
}

// What is on the table: ball, cups, a lamp along its edge, and pointers, made once and moved from then on.

const ball = make("circle", { class: "ball", r: 34, cy: FLOOR - 34, visibility: "hidden" });
const cups = Array.from({ length: 5 }, (_, slot) => {
  const cup = make(
    "g",
    { class: "cup", role: "button", tabindex: 0, "aria-label": `Cup ${slot + 1}` },
    make("path", { class: "body", d: "M -44 -150 Q -42 -160 -32 -160 L 32 -160 Q 42 -160 44 -150 L 68 -12 L -68 -12 Z" }),
    make("path", { class: "shine", d: "M -26 -144 L -12 -144 L -20 -24 L -42 -24 Z" }),
    make("rect", { class: "rim", x: -76, y: -18, width: 152, height: 20, rx: 10 }),
  );
  cup.addEventListener("click", () => choose(slot + 1));
  cup.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(slot + 1);
    }
  });
  return cup;
});
const lamp = make("rect", { class: "lamp", x: 8, y: FLOOR + 38, width: 984, height: 10, rx: 5 });
const pointers = make("g");
stage.append(
  make("rect", { class: "table", x: 8, y: FLOOR - 24, width: 984, height: 60, rx: 30 }),
  lamp,
  ball,
  ...cups,
  ...cups.map((_, slot) => {
    const label = make("text", { class: "slot", x: across(slotPosition(slot)), y: FLOOR + 24 });
    label.textContent = slot + 1;
    return label;
  }),
  pointers,
);
placeCups(cupsAt([], 0));
drawScores();

function placeCups(placed) {
  placed.forEach(([position, height], slot) => {
    cups[slot].setAttribute("transform", `translate(${across(position)} ${FLOOR - LIFT * height})`);
  });
}

function showBall(slot, height) {
  ball.setAttribute("cx", across(slotPosition(slot)));
  ball.setAttribute("visibility", height > 0 ? "visible" : "hidden");
  const placed = cupsAt([], 0);
  placed[slot][1] = height;
  placeCups(placed);
}

// One lane for each player, with a hand that moves along it.
function makePointers(names) {
  const lane = Math.min(30, 110 / Math.max(names.length, 1));
  pointers.replaceChildren(
    ...names.map((name, i) => {
      const y = FLOOR + 76 + lane * i;
      const hand = make("path", { class: "hand", d: "M 0 -16 L 15 12 L 0 5 L -15 12 Z" });
      hand.dataset.player = name;
      hand.dataset.y = y;
      return make("g", { class: `player-${name}` }, make("line", { class: "lane", x1: 100, x2: 900, y1: y, y2: y }), hand);
    }),
  );
  names.forEach((name) => movePointer(name, 0));
}

function movePointer(name, position) {
  const hand = pointers.querySelector(`[data-player="${name}"]`);
  const inside = Math.max(-1.15, Math.min(1.15, position));
  hand?.setAttribute("transform", `translate(${across(inside)} ${hand.dataset.y})`);
}

// The value of a path of numbers, one for each frame, between two frames.
function along(path, time) {
  const before = Math.max(0, Math.min(path.length - 1, Math.floor(time)));
  const after = Math.min(path.length - 1, before + 1);
  return path[before] + (path[after] - path[before]) * Math.max(0, Math.min(1, time - before));
}

// Calls `draw` with the seconds since the start until it returns false, or another animation has begun. While nobody sees
// the page the browser asks for no pictures, and the time stands still: no swap may be missed.
function animate(draw) {
  const own = ++run;
  return new Promise((done) => {
    let seconds = 0;
    let last = null;
    requestAnimationFrame(function next(now) {
      seconds += Math.min(LONGEST_STEP, (now - (last ?? now)) / 1000);
      last = now;
      if (own !== run || draw(seconds) === false) return done(own === run);
      requestAnimationFrame(next);
    });
  });
}

async function start() {
  const given = form.elements;
  const request = { timing: given.timing.value, swaps: given.swaps.valueAsNumber };
  if (Number.isNaN(request.swaps)) return say(status, "Give a number of swaps from 0 to 256.", true);
  run++; // ends an animation that goes on
  phase = "starting";
  startButton.disabled = true;
  lookButton.hidden = true;
  let drawn;
  try {
    drawn = await ask("start", request);
  } catch (error) {
    phase = "idle";
    return say(status, error.message, true);
  } finally {
    startButton.disabled = false;
  }
  game = { ...request, ...drawn };
  startButton.textContent = "Start again";
  for (const { name, label } of game.players) if (!scores.has(name)) scores.set(name, newScore(label));
  scores.forEach((score) => (score.last = ""));
  drawScores();
  await watch(Number(given.speed.value));
}

async function watch(framesPerSecond) {
  phase = "watching";
  lamp.classList.remove("on");
  stage.classList.remove("choosing");
  cups.forEach((cup) => cup.classList.remove("chosen", "found"));
  makePointers([...game.players.map((player) => player.name), "you"]);
  const { slot } = game.reveal;
  say(status, "The ball is here. Watch it.");
  const seen = await animate((seconds) => {
    const part = seconds / REVEAL_SECONDS;
    showBall(slot, REVEALED_HEIGHT * Math.max(0, Math.min(1, 4 * part, 4 * (1 - part))));
    return part < 1;
  });
  if (!seen) return;
  say(status, game.players.length ? "Watch the ball. The policies are watching too." : "Watch the ball.");
  const watched = await animate((seconds) => {
    const time = seconds * framesPerSecond;
    placeCups(cupsAt(game.moves, time));
    for (const player of game.players) movePointer(player.name, along(player.path, time));
    find(".progress span").style.width = `${Math.min(100, (100 * time) / game.frames)}%`;
    return time < game.frames;
  });
  if (!watched) return;
  placeCups(cupsAt([], 0));
  phase = "choosing";
  lamp.classList.add("on");
  stage.classList.add("choosing");
  say(status, "Where is the ball? Click a cup, or press 1 to 5.");
}

async function choose(cup) {
  if (phase === "watching") return say(status, "Wait for the green light.");
  if (phase !== "choosing") return;
  phase = "reaching";
  stage.classList.remove("choosing");
  cups[cup - 1].classList.add("chosen");
  movePointer("you", slotPosition(cup - 1));
  let ending;
  try {
    ending = await ask("answer", { game: game.game, cup });
  } catch (error) {
    phase = "idle";
    return say(status, error.message, true);
  }
  say(status, ending.players.length ? "The policies reach." : "");
  const reached = await animate((seconds) => {
    const time = seconds * REACH_FRAMES_PER_SECOND;
    for (const player of ending.players) movePointer(player.name, along(player.path, time));
    return time < Math.max(0, ...ending.players.map((player) => player.path.length));
  });
  if (!reached) return;
  await finish(cup, ending);
}

async function finish(cup, ending) {
  for (const player of ending.players) movePointer(player.name, slotPosition(player.chosen));
  cups[ending.ball].classList.add("found");
  countResult("you", ending.right, cup);
  for (const player of ending.players) countResult(player.name, player.right, player.chosen + 1);
  const chance = scores.get("chance");
  chance.right += game.chance;
  chance.games += 1;
  chance.last = percent(game.chance);
  drawScores();
  say(status, `The ball is under cup ${ending.ball + 1}. ${ending.right ? "You found it." : `You chose cup ${cup}.`}`);
  lookButton.hidden = game.players.length === 0;
  lookButton.onclick = () =>
    lookInside({ kind: "episode", timing: game.timing, swaps: game.swaps, seed: ending.seed, model: game.players[0].name });
  phase = "idle";
  await animate((seconds) => {
    showBall(ending.ball, REVEALED_HEIGHT * Math.min(1, 3 * seconds));
    return seconds < 0.4;
  });
}

function countResult(name, right, cup) {
  const score = scores.get(name);
  score.games += 1;
  score.right += right ? 1 : 0;
  score.last = `${right ? "✓" : "✗"} cup ${cup}`;
}

function drawScores() {
  const order = ["you", ...[...scores.keys()].filter((name) => name !== "you" && name !== "chance"), "chance"];
  find(".score tbody").replaceChildren(
    ...order.map((name) => {
      const { label, right, games, last } = scores.get(name);
      const row = make("tr", { class: `player-${name}` });
      row.dataset.player = name;
      const whole = Number.isInteger(right) ? right : right.toFixed(1);
      row.append(
        make("th", { scope: "row" }, make("span", { class: "dot" }), label),
        make("td", { class: last.startsWith("✓") ? "right" : last.startsWith("✗") ? "wrong" : "" }, last || "–"),
        make("td", {}, games ? `${whole} of ${games}` : "–"),
        make("td", {}, games ? percent(right / games) : "–"),
      );
      return row;
    }),
  );
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
form.elements.range.addEventListener("input", () => (form.elements.swaps.value = form.elements.range.value));
form.elements.swaps.addEventListener("input", () => (form.elements.range.value = form.elements.swaps.value || 0));
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input[type=number], input[type=text], textarea, select");
  if (!typing && element.offsetParent && /^[1-5]$/.test(event.key)) choose(Number(event.key));
});
// For tests: the drawn positions are those of the episode.
element.cupsAt = cupsAt;
