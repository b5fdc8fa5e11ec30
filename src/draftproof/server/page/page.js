// The page: a conversation or a text that goes on, with what speculation does to it. Text of the model is only ever
// made into text nodes.

import { ask, chunks, Counts, firstDifference, Painter, Refusal } from "./answers.js";

const KEY = "draftproof-key"; // in the tab's own storage
const PLAIN_TOKENS = 24; // of the run that measures the speed without drafts
const PLAIN_MILLISECONDS = 1500; // and what it may take
const LARGEST_FILE = 3 << 20; // bytes; larger images are made smaller here
const LARGEST_SIDE = 1600; // pixels
const NAMES = { chat: "v1/chat/completions", completion: "v1/completions" };
const PLACEHOLDERS = { chat: "Ask something", completion: "Begin a text" };

const $ = (id) => document.getElementById(id);
const state = {
  model: null, // as /v1/models tells of it
  key: sessionStorage.getItem(KEY) ?? "",
  messages: [], // the conversation
  images: [], // data URIs, attached to the next message
  running: null, // an AbortController, while answers come
  plainSpeed: null, // tokens a second without drafts
};

// ---- small things

function make(tag, { text = null, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  if (text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

const shown = (number, digits) => (number === null ? "–" : number.toFixed(digits));
const speedOf = (number) => (number === null ? "–" : shown(number, number < 10 ? 1 : 0));
const ordinal = (n) => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;
const mode = () => document.querySelector("input[name=mode]:checked").value;
const mostDrafts = () => state.model?.speculation?.num_speculative_tokens ?? 0;

function tell(message) {
  $("problem").textContent = message;
  $("problem").hidden = message === "";
}

// ---- the key

/** Ask for a key until one is given; it is kept as long as the tab. */
function askForKey(why) {
  if (why) $("door-why").textContent = why;
  $("door").showModal();
  return new Promise((resolve) => {
    $("door-form").onsubmit = (event) => {
      event.preventDefault();
      state.key = $("key").value.trim();
      sessionStorage.setItem(KEY, state.key);
      $("door").close();
      resolve();
    };
  });
}

/** `work()`, again with another key for as long as the server does not know the one there is. */
async function withKey(work) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Refusal && error.status === 401)) throw error;
      await askForKey(state.key ? error.told : "");
    }
  }
}

// ---- what the server can do

async function start() {
  $("send").disabled = true;
  try {
    const response = await withKey(() => ask("v1/models", { key: state.key }));
    state.model = (await response.json()).data[0];
  } catch (error) {
    tell(`${error instanceof Refusal ? error.told : error} Reload the page to try again.`);
    return;
  }
  tell("");
  const name = state.model.id.split("/").at(-1);
  $("model").textContent = name;
  $("model").title = `The model that this server runs: ${state.model.id}`;
  document.title = `${name} · draftproof`;
  offer();
  $("send").disabled = false;
  $("text").focus();
}

/** Show the controls that mean something for this model. */
function offer() {
  const most = mostDrafts();
  for (let k = 1; k <= most; k++) $("drafts").append(make("option", { value: k, text: `${k} at most` }));
  const methods = state.model.speculation?.methods ?? [];
  for (const name of methods) $("method").append(make("option", { value: name, text: name }));
  $("method-field").hidden = methods.length < 2;
  for (const id of ["compare", "drafts"]) $(id).disabled = most === 0;
  if (most === 0) $("note").textContent = "This server runs without a drafter, so there is nothing to draft.";
  if (state.model.has_chat_template === false) {
    document.querySelector("input[value=completion]").checked = true;
    document.querySelector("input[value=chat]").disabled = true;
  }
  showBars(new Counts());
  changeMode();
}

function changeMode() {
  const takesImages = state.model?.input_modalities?.includes("image") && mode() === "chat";
  $("attach").hidden = !takesImages;
  if (!takesImages) attach([]);
  $("text").placeholder = PLACEHOLDERS[mode()];
  startAnew();
}

function startAnew() {
  state.running?.abort();
  state.messages = [];
  $("answers").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("new").hidden = true;
  tell("");
}

// ---- figures

function showFigures(counts) {
  const { plainSpeed } = state;
  $("per-round").textContent = shown(counts.perRound, 2);
  $("speed").textContent = speedOf(counts.speed);
  $("plain-speed").textContent = speedOf(plainSpeed);
  const ratio = counts.speed !== null && plainSpeed ? counts.speed / plainSpeed : null;
  $("speed-up").textContent = ratio === null ? "–" : `${ratio.toFixed(2)}×`;
  showBars(counts);
  const isIdle = counts.numRounds > 8 && counts.drafted.length === 0 && mostDrafts() > 0;
  $("note").textContent = isIdle ? "No drafts were asked for here: they would not pay." : "";
}

function showBars(counts) {
  const bars = $("bars");
  while (bars.children.length < Math.max(mostDrafts(), counts.drafted.length)) {
    const parts = ["place", "track", "share"].map((name) => make("span", { className: name }));
    parts[1].append(make("span", { className: "bar" }));
    bars.append(make("li", {}, ...parts));
  }
  [...bars.children].forEach((item, i) => {
    const drafted = counts.drafted[i] ?? 0;
    const accepted = counts.accepted[i] ?? 0;
    const share = drafted ? Math.round((100 * accepted) / drafted) : 0;
    const [place, track, told] = item.children;
    place.textContent = ordinal(i + 1);
    track.firstChild.style.width = `${share}%`;
    told.textContent = drafted ? `${share} %` : "";
    item.title = `Draft ${i + 1} of a round: ${accepted} accepted of ${drafted}`;
  });
}

/** Calls `show` at most once a frame, and at the end. */
function everyFrame(show) {
  let frame = 0;
  return {
    soon() {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        show();
      });
    },
    now() {
      cancelAnimationFrame(frame);
      frame = 0;
      show();
    },
  };
}

// ---- one answer

/** A place for one answer in the page. */
class Sheet {
  constructor(title = "", prompt = "") {
    this.thoughts = make("div", { className: "thoughts", title: "What the model thinks before it answers", hidden: true });
    this.text = make("div", { className: "text" });
    if (prompt) this.text.append(make("span", { className: "prompt", text: prompt }));
    this.facts = make("p", { className: "facts" });
    this.element = make("article", { className: "answer" }, this.thoughts, this.text, this.facts);
    if (title) this.element.prepend(make("h3", { text: title }));
    this.painter = new Painter();
    this.content = "";
  }

  add(choice) {
    if (choice.drafts) this.painter.push(choice.drafts.pieces);
    const thought = choice.delta?.reasoning ?? "";
    const content = choice.delta?.content ?? choice.text ?? "";
    if (thought) this.thoughts.hidden = false;
    this.write(this.thoughts, thought);
    this.write(this.text, content);
    this.content += content;
  }

  write(place, text) {
    for (const run of this.painter.cut(text)) {
      const last = place.lastChild;
      const tag = run.accepted ? "MARK" : "SPAN";
      if (last?.tagName === tag && last.className === "") last.firstChild.appendData(run.text);
      else place.append(make(tag, { text: run.text }));
    }
  }

  conclude(counts, wasStopped) {
    const facts = [`${counts.ids.length} tokens`, `${speedOf(counts.speed)} tokens/s`];
    if (counts.numAccepted) facts.push(`${counts.numAccepted} drafted`);
    if (counts.seed !== null) facts.push(`seed ${counts.seed}`);
    if (wasStopped) facts.push("stopped");
    else if (counts.reason === "length") facts.push("longest answer reached");
    else if (counts.reason === "abort") facts.push("cut off by the server");
    this.facts.textContent = facts.join(" · ");
  }
}

/** Have `body` answered into `sheet`; what came of it, in time or until it was stopped. `show(counts)` as it comes. */
async function run(body, sheet, show) {
  const counts = new Counts();
  const { signal } = state.running;
  const frames = everyFrame(() => {
    show(counts);
    scrollAlong();
  });
  sheet.element.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of chunks(NAMES[mode()], { key: state.key, body, signal })) {
      counts.add(chunk, performance.now());
      if (chunk.choices[0]) sheet.add(chunk.choices[0]);
      frames.soon();
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  } finally {
    sheet.element.removeAttribute("aria-busy");
    sheet.conclude(counts, signal.aborted);
    frames.now();
  }
  return counts;
}

/** Tokens a second without drafts, by a few tokens that nobody sees. */
async function measurePlain(body) {
  const counts = new Counts();
  const signal = AbortSignal.any([state.running.signal, AbortSignal.timeout(PLAIN_MILLISECONDS)]);
  const few = { ...plain(body), max_tokens: Math.min(body.max_tokens, PLAIN_TOKENS) };
  try {
    for await (const chunk of chunks(NAMES[mode()], { key: state.key, body: few, signal })) {
      counts.add(chunk, performance.now());
    }
  } catch (error) {
    if (!signal.aborted) throw error;
  }
  return counts.speed;
}

const plain = (body) => ({ ...body, speculation: { num_speculative_tokens: 0 } });
const isPlain = (body) => mostDrafts() === 0 || body.speculation.num_speculative_tokens === 0;

// ---- a question and what comes of it

function settings() {
  const given = { max_tokens: $("max-tokens").valueAsNumber || 256 };
  if ($("temperature").value !== "") given.temperature = $("temperature").valueAsNumber;
  if ($("seed").value !== "") given.seed = $("seed").valueAsNumber;
  if (mostDrafts() > 0) {
    const k = $("drafts").value;
    given.speculation = { num_speculative_tokens: k === "auto" ? "auto" : Number(k) };
    if ($("method").value) given.speculation.method = $("method").value;
  }
  return given;
}

/** What the server is asked for. */
function bodyOf(text, images) {
  const body = { model: state.model.id, ...settings() };
  if (mode() === "completion") return { ...body, prompt: text };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = parts.length ? [...parts, { type: "text", text }] : text;
  return { ...body, messages: [...state.messages, { role: "user", content }] };
}

/** One answer; the sheet that it is on. */
async function answer(body, prompt, place) {
  const sheet = new Sheet("", prompt);
  place.append(sheet.element);
  if (!isPlain(body) && state.plainSpeed === null) {
    $("state").textContent = "measuring speed without drafts";
    state.plainSpeed = await measurePlain(body);
  }
  $("state").textContent = "answering";
  await run(body, sheet, (counts) => {
    if (isPlain(body)) state.plainSpeed = counts.speed ?? state.plainSpeed;
    showFigures(counts);
  });
  return sheet;
}

/** The answer without drafts, then with them: one after the other, so that neither slows the other down. */
async function compare(body, prompt, place) {
  const sheets = [new Sheet("Without drafts", prompt), new Sheet("With drafts", prompt)];
  const verdict = make("p", { className: "verdict", role: "status" });
  place.append(make("div", { className: "columns" }, ...sheets.map((sheet) => sheet.element)), verdict);
  const asked = { ...body, seed: body.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] };
  if (isPlain(asked)) asked.speculation = { num_speculative_tokens: "auto" };
  $("state").textContent = "answering without drafts";
  const one = await run(plain(asked), sheets[0], (counts) => {
    state.plainSpeed = counts.speed ?? state.plainSpeed;
    $("plain-speed").textContent = speedOf(state.plainSpeed);
  });
  $("state").textContent = "answering with drafts";
  const other = await run(asked, sheets[1], showFigures);
  judge(verdict, one, other, state.running.signal.aborted);
  scrollAlong(true);
  return sheets[1];
}

/** Say whether two answers are the same, by their ids. */
function judge(place, one, other, wasStopped) {
  const at = firstDifference(one.ids, other.ids);
  const isSame = at < 0 && (wasStopped || one.ids.length === other.ids.length);
  const number = Math.min(one.ids.length, other.ids.length);
  place.className = `verdict ${isSame ? "yes" : "no"}`;
  if (wasStopped && at < 0) {
    place.textContent = number
      ? `Identical so far: yes, the first ${number} tokens; stopped.`
      : "Identical: not known, since it was stopped.";
    place.classList.toggle("yes", number > 0);
  } else if (isSame) {
    const ratio = one.speed && other.speed ? ` ${(other.speed / one.speed).toFixed(2)}× the speed.` : "";
    place.textContent = `Identical: yes, all ${number} tokens.${ratio}`;
  } else {
    const where = at < 0 ? `${one.ids.length} tokens and ${other.ids.length}` : `token ${at + 1} differs`;
    place.textContent = `Identical: no, ${where}.`;
  }
  place.title = "Compared in this page, token id by token id";
}

async function submit() {
  const isChat = mode() === "chat";
  const text = isChat ? $("text").value.trim() : $("text").value;
  if (state.running || !state.model || (text === "" && !state.images.length)) return;
  const given = { text, images: state.images };
  const body = bodyOf(text, given.images);
  const place = make("section", { className: "turn" });
  if (isChat) place.append(questionOf(given));
  begin(place, isChat);
  try {
    const work = mostDrafts() > 0 && $("compare").checked ? compare : answer;
    const sheet = await work(body, isChat ? "" : text, place);
    if (isChat) state.messages = [...body.messages, { role: "assistant", content: sheet.content }];
  } catch (error) {
    await failed(error, given, place, isChat);
  } finally {
    end();
  }
}

function questionOf({ text, images }) {
  const pictures = images.map((src) => make("img", { src, alt: "An attached image" }));
  return make("article", { className: "question" }, ...pictures, make("p", { text }));
}

function begin(place, isChat) {
  state.running = new AbortController();
  $("welcome").hidden = true;
  $("answers").append(place);
  $("answers").scrollIntoView(false);
  if (isChat) {
    $("text").value = "";
    attach([]);
  }
  setRunning(true);
  tell("");
  scrollAlong(true);
}

function end() {
  state.running = null;
  setRunning(false);
  $("state").textContent = "";
  $("text").focus();
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("new").hidden = isRunning || !$("answers").querySelector(".turn");
  for (const control of $("modes").querySelectorAll("input")) {
    control.disabled = isRunning || (control.value === "chat" && state.model.has_chat_template === false);
  }
}

/** Say what went wrong, and give back what was asked where nothing of the answer came. */
async function failed(error, given, place, isChat) {
  const isRefusal = error instanceof Refusal;
  tell(isRefusal ? error.told : `Something went wrong in this page: ${error}`);
  if (!isRefusal) console.error(error);
  if (!place.querySelector(".text :not(.prompt)")) {
    place.remove();
    $("welcome").hidden = $("answers").querySelector(".turn") !== null;
    if (isChat && $("text").value === "") {
      $("text").value = given.text;
      attach(given.images);
    }
  }
  if (isRefusal && error.status === 401) await askForKey(error.told);
}

function scrollAlong(always = false) {
  const view = $("talk").scrollHeight > $("talk").clientHeight ? $("talk") : document.scrollingElement;
  const left = view.scrollHeight - view.scrollTop - view.clientHeight;
  if (always || left < 120) view.scrollTop = view.scrollHeight;
}

// ---- images

/** A file as a data URI, made smaller where it is large. */
async function dataOf(file) {
  if (file.size <= LARGEST_FILE) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: bitmap.width * scale, height: bitmap.height * scale });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function attach(images) {
  state.images = images;
  const items = images.map((src, i) => {
    const remove = make("button", { type: "button", title: "Take this image away", text: "×" });
    remove.onclick = () => attach(state.images.filter((_, other) => other !== i));
    return make("li", {}, make("img", { src, alt: `Attached image ${i + 1}` }), remove);
  });
  $("images").replaceChildren(...items);
}

async function take(files) {
  try {
    attach([...state.images, ...(await Promise.all([...files].map(dataOf)))]);
  } catch (error) {
    tell(`This file cannot be read as an image: ${error.message}`);
  }
}

// ---- hands

$("ask").onsubmit = (event) => {
  event.preventDefault();
  submit();
};
$("ask").addEventListener("invalid", () => ($("settings").open = true), true);
$("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("text").onpaste = (event) => {
  if ($("attach").hidden || !event.clipboardData.files.length) return;
  event.preventDefault();
  take(event.clipboardData.files);
};
document.onkeydown = (event) => {
  if (event.key !== "Escape") return;
  if ($("settings").open) $("settings").open = false;
  else state.running?.abort();
};
$("stop").onclick = () => state.running?.abort();
$("new").onclick = startAnew;
$("modes").onchange = changeMode;
$("file").onchange = () => {
  take($("file").files);
  $("file").value = "";
};
$("door").oncancel = (event) => event.preventDefault(); // nothing can be asked without a key

start();
