// Small charts in SVG: time series with a cursor, and box plots of norms on a common logarithmic axis.
import { duration, short, tapName } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function draw(parent, name, attributes = {}, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((m) => m * size).find((top) => top >= value);
}

// series: [{values, second?}] over times; format turns a value into words; sessions are drawn as dashed lines.
export function timeChart(box, times, series, format, sessions = []) {
  box.replaceChildren();
  if (times.length < 2) {
    const note = document.createElement("p");
    note.className = "empty";
    note.textContent = "Waiting for the first figures.";
    box.append(note);
    return;
  }
  const width = box.clientWidth, height = box.clientHeight, left = 54, bottom = 20, top = 6;
  const svg = draw(box, "svg", { viewBox: `0 0 ${width} ${height}` });
  const first = times[0], span = times.at(-1) - first || 1;
  const most = niceTop(Math.max(...series.flatMap((s) => s.values)));
  const x = (t) => left + ((t - first) / span) * (width - left - 8);
  const y = (v) => top + (1 - v / most) * (height - top - bottom);
  for (const share of [0, 0.5, 1]) {
    draw(svg, "line", { class: "grid", x1: left, x2: width - 8, y1: y(share * most), y2: y(share * most) });
    draw(svg, "text", { x: left - 8, y: y(share * most) + 4, "text-anchor": "end" }, format(share * most));
  }
  const marks = width < 480 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1];
  for (const share of marks) {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    draw(svg, "text", { x: x(first + share * span), y: height - 3, "text-anchor": anchor }, duration(share * span));
  }
  for (const at of sessions) {
    if (at > first) draw(svg, "line", { class: "session", x1: x(at), x2: x(at), y1: top, y2: height - bottom });
  }
  for (const { values, second } of series) {
    const line = values.map((v, i) => `${i ? "L" : "M"}${x(times[i]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    if (!second) draw(svg, "path", { class: "area", d: `${line}L${x(times.at(-1))} ${y(0)}L${left} ${y(0)}Z` });
    draw(svg, "path", { class: second ? "line second" : "line", d: line });
  }
  addCursor(box, svg, times, series, { x, format, top, floor: height - bottom, width });
}

function addCursor(box, svg, times, series, { x, format, top, floor, width }) {
  const cursor = draw(svg, "line", { class: "cursor", y1: top, y2: floor, visibility: "hidden" });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  box.append(tip);
  box.onpointermove = (event) => {
    const at = event.clientX - box.getBoundingClientRect().left;
    let best = 0;
    times.forEach((t, i) => { if (Math.abs(x(t) - at) < Math.abs(x(times[best]) - at)) best = i; });
    const place = x(times[best]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    tip.hidden = false;
    tip.textContent = `${series.map((s) => format(s.values[best])).join(" / ")} at ${duration(times[best] - times[0])}`;
    tip.style.left = `${Math.min(place + 8, width - tip.offsetWidth - 4)}px`;
  };
  box.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; };
}

// taps: summaries of the status; course: [[t, median of each tap]...]; odd: names of taps that a warning is about.
export function normChart(box, taps, course, odd) {
  box.replaceChildren();
  if (!taps.length) {
    const note = document.createElement("p");
    note.className = "empty";
    note.textContent = "Norms appear with the first captures.";
    box.append(note);
    return;
  }
  const narrow = box.clientWidth < 480;
  const width = box.clientWidth, row = 34, left = narrow ? 84 : 100, right = narrow ? 52 : 190;
  const height = taps.length * row + 24;
  const svg = draw(box, "svg", { class: "norms", viewBox: `0 0 ${width} ${height}`, height });
  const low = Math.floor(Math.log10(Math.min(...taps.map((t) => t.low)) * 0.9));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...taps.map((t) => t.high)) * 1.1)));
  const x = (v) => left + ((Math.log10(v) - low) / (high - low)) * (width - left - right);
  for (let power = low; power <= high; power++) {
    draw(svg, "line", { class: "axis", x1: x(10 ** power), x2: x(10 ** power), y1: 0, y2: height - 20 });
    draw(svg, "text", { x: x(10 ** power), y: height - 5, "text-anchor": "middle" }, short(10 ** power));
  }
  taps.forEach((tap, index) => {
    const middle = index * row + row / 2;
    const group = draw(svg, "g", { class: odd.has(tap.tap) ? "odd" : "" });
    const line = (name, value, half) =>
      draw(group, "line", { class: name, x1: x(value), x2: x(value), y1: middle - half, y2: middle + half });
    draw(group, "text", { class: "name", x: 0, y: middle + 4 }, tapName(tap.tap));
    draw(group, "line", { class: "whisker", x1: x(tap.low), x2: x(tap.high), y1: middle, y2: middle });
    line("whisker", tap.low, 5);
    line("whisker", tap.high, 5);
    const begin = x(tap.quartile);
    draw(group, "rect", { class: "box", x: begin, y: middle - 9, width: Math.max(2, x(tap.third_quartile) - begin), height: 18, rx: 3 });
    line("median", tap.median, 9);
    line("recent", tap.recent_median, 4);
    draw(group, "text", { x: width - right + 10, y: middle + 4 }, narrow ? short(tap.median) : `median ${short(tap.median)}`);
    if (!narrow) spark(group, course.map((point) => point[index + 1]), width - 100, middle);
  });
}

function spark(group, values, left, middle) {
  if (values.length < 2) return;
  const low = Math.min(...values), high = Math.max(...values), span = Math.max(high - low, high * 0.4);
  const points = values.map((v, i) => `${left + (i / (values.length - 1)) * 96},${middle + 8 - ((v - low) / span) * 16}`);
  draw(group, "polyline", { class: "spark", points: points.join(" ") });
}
