// Shared by all tabs: it stands before each tab's own script, in the function that gradio makes of both, with `element`,
// `props` and `server` as its arguments.

const find = (selector) => element.querySelector(selector);
const count = (number) => number.toLocaleString("en-US");

// Near 0 and 1 with a decimal, and never as 0 or 100 what is not.
function percent(part) {
  if (part === 0 || part === 1) return `${100 * part} %`;
  const digits = part < 0.1 || part > 0.99 ? 1 : 0;
  return `${Math.max(0.1, Math.min(99.9, 100 * part)).toFixed(digits)} %`;
}

// An answer of the server, or an error whose message is a sentence for the visitor.
async function ask(name, request) {
  let answer;
  try {
    answer = await server[name](request);
  } catch {
    throw new Error("The page's server does not answer. Is it still running?");
  }
  if (!answer || answer.error) throw new Error(answer?.error ?? "The page's server gave no answer.");
  return answer;
}

function unpack(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function make(tag, attributes = {}, ...children) {
  const inSvg = ["svg", "g", "path", "circle", "ellipse", "rect", "line", "text"].includes(tag);
  const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The options of a list to choose from; what was chosen stays, if it is still among them.
function fillSelect(select, labels) {
  const before = select.value;
  select.replaceChildren(...Object.entries(labels).map(([value, label]) => make("option", { value }, label)));
  if (before in labels) select.value = before;
}

function say(status, text, isError = false) {
  status.textContent = text;
  status.classList.toggle("error", isError);
}

// Another tab is shown what to look into. It may be opened for the first time by this, and then finds it in the document.
function lookInside(what) {
  document.lookInside = what;
  document.dispatchEvent(new Event("look-inside"));
  [...document.querySelectorAll("button[role=tab]")].find((tab) => tab.textContent.trim() === "Inside")?.click();
}
