// The page: asks for the run's status every two seconds and for its course less often, and shows both.
import { normChart, timeChart } from "./charts.js";
import { bytes, clock, duration, number, short, tapName, timeOfDay } from "./format.js";

const STATUS_MS = 2000, HISTORY_MS = 10000;
const YOUNG_POINTS = 30; // a course this short is asked for as often as the status
const OVER = new Set(["finished", "failed", "interrupted", "crashed"]);
const get = (id) => document.getElementById(id);
let history = null, status = null;

function set(id, text) {
  if (get(id).textContent !== text) get(id).textContent = text;
}

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function showHead(s) {
  const share = s.progress ? (s.progress.tokens_done + s.progress.tokens_failed) / Math.max(1, s.progress.tokens_total) : 0;
  document.title = `${Math.floor(share * 1000) / 10} % ${s.state} – Headrace`;
  set("run", `\u200e${s.run}\u200e`);
  set("state", s.state);
  get("state").className = `pill ${s.state}`;
  get("error").hidden = !(s.error || s.state === "crashed" || s.progress?.paused);
  set("error", s.error || (s.progress?.paused ? `Paused: ${s.progress.paused}. It goes on by itself.` : "The process is gone. Run the same command again; it goes on."));
  get("warnings").hidden = !s.warnings.length;
  get("warnings").replaceChildren(...s.warnings.map((text) => element("li", "", text)));
}

function showHero(s) {
  const p = s.progress;
  const fact = (name, value) => {
    const row = element("div");
    row.append(element("dt", "", name), element("dd", "", value));
    return row;
  };
  get("facts").replaceChildren(
    fact("model", s.model),
    fact("engine", s.engine),
    fact("taps", s.taps.join(", ")),
    fact("codec", s.codec),
    fact("started", new Date(s.started).toLocaleString()),
    fact("session", String(s.sessions)),
  );
  if (!p) return;
  const done = p.tokens_done / Math.max(1, p.tokens_total), failed = p.tokens_failed / Math.max(1, p.tokens_total);
  set("percent", `${(Math.floor((done + failed) * 1000) / 10).toFixed(1)} %`);
  set("counts", `${number(p.tokens_done)} of ${number(p.tokens_total)} tokens · ${number(p.rows_done)} of ${number(p.rows_total)} captures`);
  get("bar-done").style.width = `${done * 100}%`;
  get("bar-failed").style.width = `${failed * 100}%`;
  get("bar").setAttribute("aria-valuenow", ((done + failed) * 100).toFixed(1));
  const over = OVER.has(s.state);
  set("eta-label", over ? "Took" : "Time left");
  set("eta", duration(over ? p.elapsed : p.eta_seconds));
  set("eta-clock", over ? "this session" : p.eta_seconds === null ? "not known yet" : clock(p.eta_seconds));
}

function showTiles(p) {
  const tile = (name, value, note, look = "") => {
    const box = element("div", `tile ${look}`);
    box.append(element("span", "label", name), element("b", "", value), element("span", "sub", note));
    return box;
  };
  const failures = Object.entries(p.errors), count = failures.reduce((sum, [, n]) => sum + n, 0);
  const worst = failures.sort((a, b) => b[1] - a[1]).slice(0, 2).map(([kind, n]) => `${kind.replaceAll("_", " ")} ${n}`).join(", ");
  const tiles = [
    tile("Throughput", `${number(p.tokens_per_second)}`, `tokens/s; overall ${number(p.tokens_per_second_overall)}`),
    tile("In flight", number(p.rows_in_flight), `rows; ${number(p.rows_behind)} behind them to write`),
    tile("Sealed", bytes(p.bytes_stored), `of ${bytes(p.bytes_raw)} raw`),
    tile("Disk left", bytes(p.disk_free), p.paused ? "too little: paused" : "free", p.paused ? "warn" : ""),
    tile("Set aside", number(p.rows_failed), p.rows_failed ? "rows, see below" : "no row", p.rows_failed ? "bad" : ""),
    tile("Bad answers", number(count), worst || "none", count ? "warn" : ""),
  ];
  if (p.staging_bytes) tiles.splice(3, 0, tile("Staging", bytes(p.staging_bytes), "to be picked up"));
  get("tiles").replaceChildren(...tiles);
}

function showFailures(s) {
  set("failures-count", s.failures_total ? `${number(s.failures_total)}${s.failures_total > s.failures.length ? `, the latest ${s.failures.length} shown` : ""}` : "");
  if (!s.failures.length) {
    get("failures").replaceChildren(element("p", "empty", "None: every row so far has its capture."));
    return;
  }
  const table = element("table"), head = element("thead"), body = element("tbody"), titles = element("tr");
  for (const name of ["reason", "row", "tries", "from", "message"]) titles.append(element("th", "", name));
  head.append(titles);
  for (const f of [...s.failures].reverse()) {
    const row = element("tr"), chip = element("td");
    chip.append(element("span", "chip", f.kind.replaceAll("_", " ")));
    row.append(chip, element("td", "key", f.key.slice(0, 12)), element("td", "tries", String(f.tries)), element("td", "origin", f.origin), element("td", "", f.message));
    body.append(row);
  }
  table.append(head, body);
  get("failures").replaceChildren(table);
}

function sentence(e) {
  switch (e.event) {
    case "start": return `session ${e.session} began with ${e.engine} ${e.engine_version}`;
    case "failure": return `row ${e.key.slice(0, 12)}, try ${e.try}: ${e.kind.replaceAll("_", " ")}: ${e.message}`;
    case "set_aside": return `row ${e.key.slice(0, 12)} set aside: ${e.kind.replaceAll("_", " ")}`;
    case "stray_answer": return `an answer to row ${e.key.slice(0, 12)}, which nobody waited for, was dropped`;
    case "round": return `trying ${number(e.rows)} failed rows again`;
    case "engine_lost": return `engine lost: ${e.message}`;
    case "engine_back": return "engine is back";
    case "end": return `session ended: ${e.outcome}${e.error ? `: ${e.error}` : ""}`;
    default: return e.message ?? e.event.replaceAll("_", " ");
  }
}

function showEvents(s) {
  const rows = [...s.events].reverse().map((e) => {
    const row = element("li");
    row.append(element("time", "", timeOfDay(e.time)), element("span", "", sentence(e)));
    return row;
  });
  get("events").replaceChildren(...(rows.length ? rows : [element("li", "empty", "Nothing yet.")]));
}

function legend(box, entries) {
  const line = element("div", "legend");
  entries.forEach((text, i) => {
    const item = element("span", i ? "second" : "");
    item.append(element("i"), text);
    line.append(item);
  });
  box.nextElementSibling?.remove();
  box.after(line);
}

function showCharts() {
  if (!history) return;
  const h = history;
  timeChart(get("chart-rate"), h.t, [{ values: h.tokens_per_second }], short, h.sessions);
  timeChart(get("chart-flight"), h.t, [{ values: h.rows_in_flight }, { values: h.rows_behind, second: true }], short, h.sessions);
  legend(get("chart-flight"), ["with the engine", "waiting for the disk"]);
  timeChart(get("chart-disk"), h.t, [{ values: h.disk_free }], bytes, h.sessions);
}

function showNorms() {
  if (!status) return;
  const odd = new Set(status.norms.map((t) => t.tap).filter((tap) => status.warnings.some((w) => mentions(w, tap))));
  normChart(get("norms"), status.norms, history?.norms ?? [], odd);
}

function mentions(warning, tap) {
  return tap === "final" ? warning.includes("the final state") : new RegExp(`\\b${tapName(tap)}\\b`).test(warning);
}

function show() {
  showHead(status);
  showHero(status);
  if (status.progress) showTiles(status.progress);
  showFailures(status);
  showEvents(status);
  showNorms();
  set("foot", status.age_seconds === null ? "" : `last sign of life ${duration(status.age_seconds)} ago`);
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

async function follow(path, pause, take) {
  for (;;) {
    try {
      take(await ask(path));
      get("offline").hidden = true;
    } catch (error) {
      console.warn(error);
      get("offline").hidden = false;
    }
    await new Promise((resume) => setTimeout(resume, pause()));
  }
}

follow("/api/status", () => STATUS_MS, (value) => { status = value; show(); });
follow("/api/history", () => ((history?.t.length ?? 0) < YOUNG_POINTS ? STATUS_MS : HISTORY_MS), (value) => { history = value; showCharts(); showNorms(); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { showCharts(); showNorms(); }, 150); });
