// Answers of the server: asked for, read event by event, counted. Nothing here knows the page.

/** A server's "no". `status` 0: it could not be reached. */
export class Refusal extends Error {
  constructor(status, message, seconds = null) {
    super(message);
    this.status = status;
    this.seconds = seconds; // to wait before asking again, where the server says so
  }

  /** What to tell whoever asked. */
  get told() {
    const wait = this.seconds === null ? "in a moment" : `in ${this.seconds} s`;
    if (this.status === 0) return "The server cannot be reached. Is it running?";
    if (this.status === 401) return "The server does not know this key.";
    if (this.status === 413) return "That is too much for this server: send less, or a smaller image.";
    if (this.status === 429) return `The server is busy. Ask again ${wait}.`;
    if (this.status === 503) return `The server takes no requests at present (${this.message}). Ask again ${wait}.`;
    if (this.status >= 500) return `The server failed at this: ${this.message}`;
    return `The server cannot do that: ${this.message}`;
  }
}

/** Ask for `path`; the response, where it is none of refusal. */
export async function ask(path, { key = "", body = null, signal = null } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const given = { headers, signal, method: "GET", credentials: "omit" };
  if (body !== null) {
    headers["Content-Type"] = "application/json";
    Object.assign(given, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(path, given);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, String(error));
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  const wait = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  const message = told.error?.message ?? response.statusText;
  throw new Refusal(response.status, message, Number.isNaN(wait) ? null : wait);
}

/** The data of server-sent events, wherever the stream was cut; comments are passed over. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((one) => one.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "" || data.length === 0) continue;
        yield data.join("\n");
        data = [];
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the server hears of it, and computes no further
  }
}

/** Chunks of a streamed answer. Throws a Refusal for an error, however late it comes. */
export async function* chunks(path, options) {
  const body = {
    ...options.body,
    stream: true,
    return_token_ids: true,
    stream_options: { include_usage: true, include_drafts: true },
  };
  const response = await ask(path, { ...options, body });
  let isOver = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        isOver = true;
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(500, chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refusal(0, String(error));
    throw error;
  }
  if (!isOver) throw new Refusal(0, "the stream broke off");
}

/** What came so far of one answer: ids, times, what became of drafts. */
export class Counts {
  constructor() {
    this.ids = [];
    this.numRounds = 0;
    this.numAccepted = 0;
    this.drafted = []; // rounds that had more than i drafts
    this.accepted = []; // and that accepted more than i
    this.first = null; // milliseconds
    this.last = null;
    this.told = null; // the server's own times, at the end
    this.seed = null;
    this.reason = null;
  }

  /** Take in a chunk that came at `now`. */
  add(chunk, now) {
    this.seed = chunk.seed ?? this.seed;
    this.told = chunk.metrics ?? this.told;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    if (!choice.token_ids?.length) return;
    this.first ??= now;
    this.last = now;
    this.ids.push(...choice.token_ids);
    const drafts = choice.drafts;
    if (!drafts || drafts.num_drafted === null) return;
    this.numRounds += 1;
    this.numAccepted += drafts.num_accepted;
    for (let i = 0; i < drafts.num_drafted; i++) {
      this.drafted[i] = (this.drafted[i] ?? 0) + 1;
      this.accepted[i] = (this.accepted[i] ?? 0) + (i < drafts.num_accepted);
    }
  }

  /** tau; null before the first round. */
  get perRound() {
    return this.numRounds ? 1 + this.numAccepted / this.numRounds : null;
  }

  /** Tokens a second from the first one on: by the server's clock once it has told. */
  get speed() {
    const milliseconds = this.told ? this.told.generation_time_ms : this.last - this.first;
    return this.ids.length > 1 && milliseconds > 0 ? (1000 * (this.ids.length - 1)) / milliseconds : null;
  }
}

/** Where two lists of ids differ first; -1: one is how the other begins. */
export function firstDifference(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let i = 0; i < shorter; i++) if (one[i] !== other[i]) return i;
  return -1;
}

/**
 * Cuts text into stretches that were drafted and stretches that were not. A parser of the server's may have taken
 * markers out of the text, so that it is part of what `pieces` hold, in the same order.
 */
export class Painter {
  constructor() {
    this.waiting = ""; // characters that were written and not shown
    this.marks = [];
  }

  push(pieces) {
    for (const { text, accepted } of pieces) {
      this.waiting += text;
      for (let i = 0; i < text.length; i++) this.marks.push(accepted);
    }
  }

  cut(text) {
    const runs = [];
    let end = 0;
    for (const character of text) {
      const found = this.waiting.indexOf(character, end);
      const accepted = found >= 0 && this.marks[found];
      if (found >= 0) end = found + character.length;
      if (runs.length && runs.at(-1).accepted === accepted) runs.at(-1).text += character;
      else runs.push({ text: character, accepted });
    }
    this.waiting = this.waiting.slice(end);
    this.marks.splice(0, end);
    return runs;
  }
}
