// Rivet's workflow engine over a SQLite file. It reads requests line by line from standard input (see rivet.py).
//
// The engine requires a key-value store per workflow, and has no group commit. This store is one table in one file, with
// `synchronous = FULL`, so that an acknowledged write is on disk. "plain": each write (a batch of the engine is one write)
// is a transaction, as in any driver that implements the interface. "grouped": all writes of one event-loop iteration
// share a transaction, which makes it several times faster.

import { closeSync, existsSync, openSync, writeSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, folder, mode] = process.argv.slice(2);
const require = createRequire(join(modules, "node_modules", "here.js"));
const Database = require("better-sqlite3");
const { runWorkflow } = await import(
  pathToFileURL(join(modules, "node_modules/@rivetkit/workflow-engine/dist/tsup/index.js")).href
);

const STEPS = 10;

// --- the store ---------------------------------------------------------------------------------------------------

const file = new Database(join(folder, "rivet.db"));
file.pragma("journal_mode = WAL");
file.pragma("synchronous = FULL");
file.exec("CREATE TABLE IF NOT EXISTS kv (run TEXT, key BLOB, value BLOB, PRIMARY KEY (run, key)) WITHOUT ROWID");
const put = file.prepare("INSERT OR REPLACE INTO kv VALUES (?, ?, ?)");
const drop = file.prepare("DELETE FROM kv WHERE run = ? AND key = ?");
const dropRange = file.prepare("DELETE FROM kv WHERE run = ? AND key >= ? AND key < ?");
const one = file.prepare("SELECT value FROM kv WHERE run = ? AND key = ?").pluck();
const range = file.prepare("SELECT key, value FROM kv WHERE run = ? AND key >= ? AND key < ? ORDER BY key");

let waiting = [];

function commit() {
  const batch = waiting;
  waiting = [];
  file.transaction(() => batch.forEach(({ write }) => write()))();
  batch.forEach(({ done }) => done());
}

function durably(write) {
  if (mode === "plain") {
    file.transaction(write)();
    return Promise.resolve();
  }
  return new Promise((done) => {
    if (waiting.push({ write, done }) === 1) setImmediate(commit);
  });
}

// Returns the first key after all keys with this prefix.
function after(prefix) {
  const end = Buffer.from(prefix);
  for (let at = end.length - 1; at >= 0; at--) {
    if (end[at] < 255) {
      end[at]++;
      return end.subarray(0, at + 1);
    }
  }
  return Buffer.alloc(64, 255);
}

// The engine slices values. The slice of a Buffer is a view; the slice of a Uint8Array is a copy.
const plain = (buffer) => new Uint8Array(buffer);

class SqliteDriver {
  atomicBatch = true;
  workerPollInterval = 100;
  messageDriver = { addMessage: async () => {}, receiveMessages: async () => [], completeMessage: async () => {} };

  constructor(run) {
    this.run = run;
  }
  async get(key) {
    const value = one.get(this.run, key);
    return value === undefined ? null : plain(value);
  }
  async list(prefix) {
    const found = range.all(this.run, prefix, after(prefix));
    return found.map(({ key, value }) => ({ key: plain(key), value: plain(value) }));
  }
  set(key, value) {
    return durably(() => put.run(this.run, key, value));
  }
  batch(writes) {
    return durably(() => writes.forEach(({ key, value }) => put.run(this.run, key, value)));
  }
  delete(key) {
    return durably(() => drop.run(this.run, key));
  }
  batchDelete(keys) {
    return durably(() => keys.forEach((key) => drop.run(this.run, key)));
  }
  deletePrefix(prefix) {
    return this.deleteRange(prefix, after(prefix));
  }
  deleteRange(start, end) {
    return durably(() => dropRange.run(this.run, start, end));
  }
  async setAlarm() {}
  async clearAlarm() {}
  waitForMessages() {
    return new Promise(() => {});
  }
}

// --- the workflows -----------------------------------------------------------------------------------------------

async function gate(number) {
  if (!existsSync(join(folder, "gate-open"))) {
    const line = openSync(join(folder, "gate-arrivals"), "a");
    writeSync(line, ".");
    closeSync(line);
    await new Promise(() => {});
  }
  return number;
}

const workflows = {
  async one_step(ctx, number) {
    return await ctx.step("step", async () => number);
  },
  async ten_steps(ctx, number) {
    for (let at = 0; at < STEPS; at++) number = await ctx.step(`step ${at}`, async () => number);
    return number;
  },
  async halfway(ctx, number) {
    for (let at = 0; at < STEPS / 2; at++) await ctx.step(`step ${at}`, async () => number);
    await ctx.step({ name: "gate", timeout: 0, run: () => gate(number) });
    for (let at = STEPS / 2; at < STEPS; at++) await ctx.step(`step ${at}`, async () => number);
    return number;
  },
  async parallel(ctx, number) {
    const branch = (at) => [`branch ${at}`, { run: (inner) => inner.step("step", async () => at) }];
    const branches = Object.fromEntries(Array.from({ length: number }, (_, at) => branch(at)));
    return Object.keys(await ctx.join("all", branches)).length;
  },
};

// --- requests ----------------------------------------------------------------------------------------------------

let runs = 0;
const started = new Map();

function startWorkflow(workflow, number, id) {
  return runWorkflow(id, workflows[workflow], number, new SqliteDriver(id), { mode: "live" }).result;
}

// The host of the engine must store which workflows exist. Here that is a row of the same table, written first.
const register = (id, what) => durably(() => put.run("", Buffer.from(id), Buffer.from(JSON.stringify(what))));

const handlers = {
  async execute({ workflow, number }) {
    const id = `${process.pid}-${runs++}`;
    const startedAt = performance.now();
    await register(id, { workflow, number });
    const { output } = await startWorkflow(workflow, number, id);
    return { value: output, seconds: (performance.now() - startedAt) / 1000 };
  },
  async start({ workflow, number, id }) {
    await register(id, { workflow, number });
    started.set(id, startWorkflow(workflow, number, id));
    return {};
  },
  async result({ id }) {
    return { value: (await started.get(id)).output };
  },
};

for (const { key, value } of range.all("", Buffer.alloc(0), Buffer.alloc(64, 255))) {
  const { workflow, number } = JSON.parse(value.toString());
  const id = key.toString();
  started.set(id, startWorkflow(workflow, number, id));
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  const respond = (response) =>
    process.stdout.write(`${JSON.stringify({ request_id: request.request_id, ...response })}\n`);
  handlers[request.verb](request).then(
    (response) => respond(response),
    (error) => respond({ error: String(error) }),
  );
}
process.exit(0);
