// What a screen reader hears of an answer: a sentence at a time, and its end; it can be switched off.
const KEY = "enginehouse.speech";
let rest = "";
let numWords = 0;
let last = " "; // character that was heard last: words are counted where they begin

export const speech = {
  get isOn() {
    return localStorage.getItem(KEY) !== "off";
  },
  set isOn(value) {
    localStorage.setItem(KEY, value ? "on" : "off");
  },
};

function put(text) {
  const region = document.getElementById("spoken");
  if (region && speech.isOn) region.textContent = text;
}

export function say(text) {
  numWords += (`${last}${text}`.match(/\s\S/g) ?? []).length;
  last = text.at(-1) ?? last;
  rest += text;
  const end = rest.search(/[.!?:]\s(?=\S*$)|\n\S*$/);
  if (end < 0) return;
  put(rest.slice(0, end + 1).replace(/[#*`|_]+/g, ""));
  rest = rest.slice(end + 1);
}

export function sayEnd() {
  put(`${rest.replace(/[#*`|_]+/g, "").trim()} Answer finished, ${numWords} ${numWords === 1 ? "word" : "words"}.`);
  rest = "";
  last = " ";
  numWords = 0;
}
