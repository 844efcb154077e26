/** A tab that asks the server for one thing, again when it has changed, and only while the tab is shown. */

import { ask } from "./api.js";
import { throttled } from "./frames.js";

const REFRESH_MS = 1000;

export class LiveView {
  /**
   * @param {string} name what the server is asked for
   * @param {{failed: (error: unknown) => void}} page
   */
  constructor(name, page) {
    this.page = page;
    this.active = false;
    this.refresh = throttled(async () => {
      try {
        this.take(await ask(name, this.question()));
      } catch (error) {
        this.page.failed(error);
      }
    }, REFRESH_MS);
  }

  /** The tab is shown, or is not. @param {boolean} active */
  setActive(active) {
    this.active = active;
    if (active) this.refresh();
  }

  /** The server has something new. */
  onChange() {
    if (this.active) this.refresh();
  }

  /** The parameters of what is asked. @returns {Record<string, any>} */
  question() {
    return {};
  }

  /** Shows the server's answer. @param {any} answer */
  take(answer) {
    throw new Error(`a view has to show ${Object.keys(answer)}`);
  }
}
