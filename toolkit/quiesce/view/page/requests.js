/**
 * Everything that the page asks of its server. Rules: never more than a few questions under way, what is outdated is
 * given up, and whether Prometheus and the server are there is known from the answers.
 */

/** Questions under way at once. */
export const MOST = 4;

/** Why a question was not answered. */
export class AskError extends Error {
  constructor(message, { kind = "refused", status = 0 } = {}) {
    super(message);
    this.kind = kind; // "server": the page's own server is away; "prometheus": Prometheus is; "refused": an answer, but no
    this.status = status;
  }
}

/** A queue of questions, first come, first served. */
export class Queue {
  #waiting = [];
  #running = 0;

  constructor(most = MOST) {
    this.most = most;
    this.peak = 0;
    this.asked = 0;
    this.cancelled = 0;
  }

  /** Run `work()` when its turn comes; a signal that fires before then takes it out of the queue. */
  run(work, signal) {
    return new Promise((resolve, reject) => {
      const entry = { work, resolve, reject, signal };
      const leave = () => {
        const at = this.#waiting.indexOf(entry);
        if (at < 0) return;
        this.#waiting.splice(at, 1);
        this.cancelled += 1;
        reject(new DOMException("outdated", "AbortError"));
      };
      if (signal?.aborted) { reject(new DOMException("outdated", "AbortError")); return; }
      signal?.addEventListener("abort", leave, { once: true });
      entry.leave = leave;
      this.#waiting.push(entry);
      this.#next();
    });
  }

  #next() {
    while (this.#running < this.most && this.#waiting.length) {
      const { work, resolve, reject, signal, leave } = this.#waiting.shift();
      signal?.removeEventListener("abort", leave);
      this.#running += 1;
      this.asked += 1;
      this.peak = Math.max(this.peak, this.#running);
      Promise.resolve().then(work).then(resolve, reject).finally(() => { this.#running -= 1; this.#next(); });
    }
  }
}

/** Talks to the server, and tells `onHealth(kind, message)` what it learns; kind is "ok", "server" or "prometheus". */
export class Server {
  constructor({ onHealth = () => {}, queue = new Queue(), fetcher = (...given) => fetch(...given) } = {}) {
    this.onHealth = onHealth;
    this.queue = queue;
    this.fetcher = fetcher;
  }

  /** Fetch a JSON document of the server. Raises AskError. */
  async json(path, { signal } = {}) {
    let answer;
    try {
      answer = await this.fetcher(path, { signal, headers: { Accept: "application/json" }, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      const message = "the server of this page does not answer: is `quiesce view` still running?";
      this.onHealth("server", message);
      throw new AskError(message, { kind: "server" });
    }
    let body = null;
    try { body = await answer.json(); } catch (error) { if (error.name === "AbortError") throw error; }
    if (answer.ok && body !== null) return body;
    throw new AskError(body?.error ?? body?.detail ?? `the server answered ${answer.status}`, { status: answer.status });
  }

  /** Ask Prometheus, in turn. Returns `data` of its answer; raises AskError. */
  prometheus(path, parameters, { signal } = {}) {
    const query = new URLSearchParams(parameters).toString();
    return this.queue.run(async () => {
      try {
        const body = await this.json(`/api/prometheus/${path}${query ? `?${query}` : ""}`, { signal });
        this.onHealth("ok", "");
        if (body.status === "error") throw new AskError(body.error);
        return body.data;
      } catch (error) {
        if (error instanceof AskError && error.status >= 502 && error.status <= 504) {
          error.kind = "prometheus";
          this.onHealth("prometheus", error.message);
        } else if (error instanceof AskError && error.kind === "refused") this.onHealth("ok", "");
        throw error;
      }
    }, signal);
  }
}

/** Whether an error only says that nobody wants the answer any more. */
export function isOutdated(error) {
  return error?.name === "AbortError";
}
