/** The stream of changes from the server, which is opened again when it is lost. */

import { request } from "./api.js";

/** @typedef {import("./types.js").Change} Change */

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 5000;
const WATCHED_AT_MOST = 1024;

/** One stream at a time; `watch` changes the taps whose counts it carries. */
export class ChangeStream {
  /**
   * @param {(change: Change) => void} onChange
   * @param {(connected: boolean, again: boolean) => void} onState `again`: the stream was there before, and was lost
   */
  constructor(onChange, onState) {
    this.onChange = onChange;
    this.onState = onState;
    /** @type {AbortController|null} */
    this.source = null;
    this.wait = FIRST_WAIT_MS;
    this.watched = "";
    this.lost = false;
    /** @type {ReturnType<typeof setTimeout>|undefined} */
    this.timer = undefined;
  }

  /**
   * Names the taps to hear about. A stream that names others replaces the current one.
   * @param {number[]} taps
   */
  watch(taps) {
    const watched = taps.slice(0, WATCHED_AT_MOST).sort((a, b) => a - b).join(",");
    if (watched === this.watched && this.source) return;
    this.watched = watched;
    if (!this.lost) this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.close();
    const source = new AbortController();
    this.source = source;
    this.read(source).catch(() => null).then(() => {
      if (source === this.source) this.retry();
    });
  }

  /**
   * Reads server-sent events until the stream ends. An EventSource cannot send the header that the server asks for.
   * @param {AbortController} source
   */
  async read(source) {
    const response = await request(this.watched ? `events?watch=${this.watched}` : "events", { signal: source.signal });
    if (!response.ok || !response.body || source !== this.source) return;
    const again = this.lost;
    this.wait = FIRST_WAIT_MS;
    this.lost = false;
    this.onState(true, again);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n\n");
      text = parts.pop() ?? "";
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "));
        if (data !== undefined && source === this.source) this.onChange(JSON.parse(data.slice(6)));
      }
    }
  }

  retry() {
    this.close();
    this.lost = true;
    this.onState(false, false);
    this.timer = setTimeout(() => this.open(), this.wait);
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT_MS);
  }

  close() {
    this.source?.abort();
    this.source = null;
  }
}
