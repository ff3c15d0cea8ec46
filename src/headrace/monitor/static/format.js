// Figures as people read them. The same words as the command line uses.

export function bytes(count) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) {
      const value = count / size;
      return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
    }
  }
  return `${Math.round(count)} B`;
}

export function number(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function short(value) {
  if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (value >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return value >= 10 || value === 0 ? String(Math.round(value)) : String(+value.toPrecision(2));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "…";
  const total = Math.round(seconds);
  const days = Math.floor(total / 86400), hours = Math.floor((total % 86400) / 3600), minutes = Math.floor((total % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

export function clock(seconds) {
  const at = new Date(Date.now() + seconds * 1000);
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const today = new Date().toDateString() === at.toDateString();
  return today ? `about ${time}` : `${at.toLocaleDateString([], { weekday: "short", month: "short", day: "numeric" })}, ${time}`;
}

export function timeOfDay(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export function tapName(tap) {
  return tap === "final" ? "final" : `boundary ${tap}`;
}
