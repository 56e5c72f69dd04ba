// The timelines of a page: lanes on a canvas that zooms and pans along time.
"use strict";
/**
 * Draw timelines into a figure, and follow the pointer and the keyboard.
 * The figure with data-whole-page takes the keys of the whole page, and the address holds its view.
 * Returns { show }, which replaces the timelines by others.
 */
function penstockViewer(figure, data) {
  const wholePage = "wholePage" in figure.dataset;
  figure.classList.add("live");
  const frame = figure.querySelector(".frame"), inner = figure.querySelector(".inner");
  const canvas = figure.querySelector("canvas"), tip = figure.querySelector(".tip"), summed = figure.querySelector(".summed");
  const paint = canvas.getContext("2d");
  let KINDS = Object.keys(data.kinds);
  const AXIS = 26, STRIP = 36, RIGHT = 14, SMALL = "11px sans-serif", USUAL = "12px sans-serif";
  // Taller figures scroll within the page.
  const TALLEST = 1500;
  // Arrows and outlines of more than these would blacken the figure and take time.
  const MANY_ARROWS = 3000, MANY_BOXES = 20000;
  let whole = data.seconds || 1;
  let view = { from: 0, to: whole }, left = 80, wide = 800, high = 400, hover = null, queued = false, dragged = null, withPath = false;

  // ---- words ----
  const trimmed = (value, digits) => String(+value.toFixed(digits));
  function duration(seconds) {
    if (!data.clock.unit) return trimmed(seconds, 3);
    if (seconds === 0) return "0 s";
    for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]])
      if (Math.abs(seconds) >= factor || unit === "ns") return `${trimmed(seconds / factor, 3)} ${unit}`;
  }
  function size(bytes) {
    for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (bytes >= factor) return `${(bytes / factor).toFixed(1)} ${unit}`;
    return `${Math.round(bytes)} B`;
  }

  // ---- places ----
  const x = (seconds) => left + (seconds - view.from) / (view.to - view.from) * wide;
  const moment = (place) => view.from + (place - left) / wide * (view.to - view.from);
  /** The first index whose value is above `limit`; values ascend. */
  function above(values, limit) {
    let low = 0, up = values.length;
    while (low < up) { const middle = (low + up) >> 1; if (values[middle] > limit) up = middle; else low = middle + 1; }
    return low;
  }
  function arrange() {
    let y = 0;
    for (const panel of data.panels) {
      panel.y = y; y += data.panels.length > 1 ? 28 : 10;
      for (const rank of panel.ranks) {
        rank.y = y; rank.high = panel.paired ? 42 : panel.several ? 36 : 28;
        y += rank.high + (rank.memory ? STRIP : 0) + (panel.sent.t.length ? 18 : 6);
      }
      y += 6;
    }
    paint.font = USUAL;
    const names = data.panels.flatMap((panel) => panel.ranks.flatMap((rank) => [rank.name, rank.held, rank.memory ? size(rank.memory.peak) : ""]));
    left = Math.ceil(Math.max(40, ...names.map((name) => paint.measureText(name).width))) + 18;
    high = y + AXIS;
    inner.style.height = `${high}px`;
    const shown = Math.min(high, Math.max(TALLEST, Math.round(window.innerHeight * 0.8)));
    frame.style.height = `${shown}px`;
    const ratio = window.devicePixelRatio || 1, width = frame.clientWidth;
    wide = Math.max(100, width - left - RIGHT);
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(shown * ratio);
    canvas.style.width = `${width}px`; canvas.style.height = `${shown}px`;
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    later();
  }

  // ---- drawing ----
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let colour = {};
  function colours() {
    const style = getComputedStyle(document.documentElement);
    colour = Object.fromEntries(["ground", "ink", "soft", "line", "lane", "held", "edge", "on", "back", "pass", "link"].map(
      (name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  const fill = (kind, odd) => { const of = data.kinds[kind]; return (dark.matches && of.dark) || of.fills[odd]; };
  const later = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  function words(text, place, base, font, ink, align) {
    paint.font = font; paint.fillStyle = ink; paint.textAlign = align; paint.fillText(text, place, base);
  }
  function draw() {
    queued = false;
    const tall = canvas.clientHeight, top = frame.scrollTop;
    paint.fillStyle = colour.ground; paint.fillRect(0, 0, canvas.clientWidth, tall);
    paint.save(); paint.beginPath(); paint.rect(0, 0, canvas.clientWidth, tall - AXIS); paint.clip(); paint.translate(0, -top);
    summed.hidden = true;
    const seen = (rank) => rank.y + rank.high + STRIP > top && rank.y < top + tall;
    const ticks = moments();
    for (const panel of data.panels) {
      paint.save(); paint.beginPath(); paint.rect(left - 1, panel.y, wide + 2, high); paint.clip();
      for (const rank of panel.ranks.filter(seen)) ground(panel, rank, ticks);
      for (const rank of panel.ranks.filter(seen)) boxes(panel, rank);
      arrows(panel, top, tall);
      paint.restore();
      if (data.panels.length > 1) words(panel.title, 10, panel.y + 19, "600 13px sans-serif", colour.ink, "left");
      for (const rank of panel.ranks.filter(seen)) {
        const middle = rank.y + rank.high / 2;
        words(rank.name, left - 10, middle + (rank.held ? -2 : 4), USUAL, colour.ink, "right");
        if (rank.held) words(rank.held, left - 10, middle + 12, SMALL, colour.soft, "right");
        if (rank.memory) words(size(rank.memory.peak), left - 10, rank.y + rank.high + STRIP / 2 + 4, SMALL, colour.soft, "right");
      }
    }
    paint.restore();
    axis(tall - AXIS, ticks);
  }
  function moments() {
    const room = 72 / wide * (view.to - view.from), unit = data.clock.factor;
    let step = unit * 10 ** Math.floor(Math.log10(room / unit));
    if (!(step > 0)) return { step: whole, at: [0] };
    step *= [1, 2, 5, 10].find((times) => step * times >= room) || 10;
    if (!data.clock.unit) step = Math.max(step, wide / (view.to - view.from) > 200 ? step : 1);
    const at = [];
    for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to * (1 + 1e-12) && at.length < 200; i++) at.push(i * step);
    return { step, at };
  }
  function axis(y, ticks) {
    paint.strokeStyle = colour.edge; paint.lineWidth = 1;
    paint.beginPath(); paint.moveTo(left, y + 0.5); paint.lineTo(left + wide, y + 0.5); paint.stroke();
    const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(ticks.step / data.clock.factor) - 1e-9)));
    for (const at of ticks.at) words(trimmed(at / data.clock.factor, digits), x(at), y + 17, SMALL, colour.soft, "center");
    words(data.clock.unit ? `time, ${data.clock.unit}` : "time", left - 14, y + 17, SMALL, colour.soft, "right");
  }
  function ground(panel, rank, ticks) {
    paint.fillStyle = colour.lane;
    paint.fillRect(x(0), rank.y, x(panel.makespan) - x(0), rank.high);
    paint.fillStyle = colour.line;
    for (const at of ticks.at) paint.fillRect(x(at), rank.y, 1, rank.high);
    paint.fillStyle = colour.link;
    for (const [start, end, cause] of rank.idle || [])
      if (cause === "l" && end > view.from && start < view.to) paint.fillRect(x(start), rank.y, x(end) - x(start), rank.high);
    if (!rank.memory) return;
    const { t, b } = rank.memory, base = rank.y + rank.high + STRIP - 2, most = data.most || 1;
    paint.beginPath(); paint.moveTo(x(t[0]), base);
    // Of the steps within one point only the highest is drawn.
    let place = 0, peak = 0;
    for (let i = Math.max(0, above(t, view.from) - 1); i < t.length && t[i] <= view.to; i++) {
      const start = x(t[i]), end = x(i + 1 < t.length ? t[i + 1] : panel.makespan);
      peak = end - place < 0.5 ? Math.max(peak, b[i]) : b[i];
      const y = base - (STRIP - 5) * Math.max(peak, b[i]) / most;
      paint.lineTo(start, y); paint.lineTo(end, y);
      if (end - place >= 0.5) { place = end; peak = 0; }
    }
    paint.lineTo(Math.min(x(panel.makespan), left + wide + 1), base); paint.closePath();
    paint.fillStyle = colour.held; paint.fill(); paint.strokeStyle = colour.edge; paint.lineWidth = 0.7; paint.stroke();
  }
  function visible(rank) {
    return [Math.max(0, above(rank.e, view.from) - 1), above(rank.t, view.to)];
  }
  function boxes(panel, rank) {
    if (rank.share) { summed.hidden = false; shares(rank); return; }
    const [first, last] = visible(rank);
    if (last - first > 2 * wide) { summed.hidden = false; sums(rank, first, last); return; }
    const labels = [];
    for (let i = first; i < last; i++) {
      const start = x(rank.t[i]), width = Math.max(x(rank.e[i]) - start, 0), half = +rank.h[i];
      const tall = half ? rank.high / 2 : rank.high, y = rank.y + (half === 2 ? tall : 0);
      const odd = +rank.z[i];
      paint.fillStyle = fill(rank.k[i], odd);
      if (rank.e[i] <= rank.t[i]) { paint.fillRect(start - 1, y, 2, tall); continue; }
      const rim = width > 3 ? 0.8 : 0;
      paint.fillRect(start, y + (half === 2 ? rim : 0), Math.max(width - rim, 0.3), tall - (half === 2 ? rim : 0));
      if (width > 7) labels.push([i, start, width, y, tall, odd]);
    }
    for (const [i, start, width, y, tall, odd] of labels) {
      const number = String(rank.n[i]), ink = data.kinds[rank.k[i]].inks[odd];
      let font = SMALL;
      paint.font = font;
      if (paint.measureText(number).width + 2 > width) paint.font = font = "9px sans-serif";
      const needs = paint.measureText(number).width, dot = number.indexOf(".");
      if (needs + 2 > width) {
        if (dot < 0 || tall < 24 || paint.measureText(number.slice(0, dot)).width + 2 > width) continue;
        words(number.slice(0, dot), start + width / 2, y + tall / 2 - 1, font, ink, "center");
        words(number.slice(dot), start + width / 2, y + tall / 2 + 10, "9px sans-serif", ink, "center");
        continue;
      }
      const stage = rank.own === rank.s[i] ? "" : `s${rank.s[i]}`;
      paint.font = "9px sans-serif";
      const extra = stage ? paint.measureText(stage).width : 0, clear = Math.max(start, left) / 2 + Math.min(start + width, left + wide) / 2;
      const middle = Math.min(Math.max(clear, start + needs / 2 + 1), start + width - needs / 2 - 1), base = y + tall / 2 + 4;
      if (stage && tall < 30 && needs + extra + 8 <= width) {
        words(number, middle - extra / 2 - 1, base, font, ink, "center");
        words(stage, middle + needs / 2 + 1, base, "9px sans-serif", ink, "center");
      } else if (stage && tall >= 30 && extra + 2 <= width) {
        words(number, middle, base - 5, font, ink, "center"); words(stage, middle, base + 8, "9px sans-serif", ink, "center");
      } else words(number, middle, base, font, ink, "center");
    }
    if (withPath && rank.path && last - first < MANY_BOXES) {
      paint.strokeStyle = colour.pass; paint.lineWidth = 3;
      for (let p = above(rank.path, first - 1); p < rank.path.length && rank.path[p] < last; p++) {
        const i = rank.path[p], half = +rank.h[i], tall = half ? rank.high / 2 : rank.high;
        paint.strokeRect(x(rank.t[i]) + 1.5, rank.y + (half === 2 ? tall : 0) + 1.5, Math.max(x(rank.e[i]) - x(rank.t[i]) - 3, 1), tall - 3);
      }
    }
    if (hover && hover.panel === panel && last - first < MANY_BOXES) {
      paint.strokeStyle = colour.ink; paint.lineWidth = 1.5;
      for (let i = first; i < last; i++) {
        if (rank.n[i] !== hover.number || (rank.k[i] === "U") !== hover.update) continue;
        const half = +rank.h[i], tall = half ? rank.high / 2 : rank.high;
        paint.strokeRect(x(rank.t[i]) + 0.5, rank.y + (half === 2 ? tall : 0) + 0.5, Math.max(x(rank.e[i]) - x(rank.t[i]) - 1.5, 1), tall - 1);
      }
    }
  }
  /** More ops than columns: per column one kind on top of the other, as high as its share of the column's time. */
  function sums(rank, first, last) {
    const count = Math.ceil(wide), share = new Map(KINDS.map((kind) => [kind, new Float32Array(count + 1)]));
    for (let i = first; i < last; i++) {
      const start = Math.max(0, x(rank.t[i]) - left), end = Math.min(count, x(rank.e[i]) - left), of = share.get(rank.k[i]);
      const part = +rank.h[i] ? 0.5 : 1;
      for (let column = Math.floor(start); column < end; column++)
        of[column] += part * (Math.min(end, column + 1) - Math.max(start, column));
    }
    for (let column = 0; column < count; column++) {
      let y = rank.y + rank.high;
      for (const kind of KINDS) {
        const tall = Math.min(share.get(kind)[column], 1) * rank.high;
        if (tall > 0) { y -= tall; paint.fillStyle = fill(kind, 0); paint.fillRect(left + column, y, 1, tall); }
      }
    }
  }
  /** Shares of time per column, where the data has no ops. */
  function shares(rank) {
    const columns = Math.max(...Object.values(rank.share).map((text) => text.length));
    for (let column = 0; column < columns; column++) {
      const start = x(whole * column / columns), end = x(whole * (column + 1) / columns);
      if (end < left || start > left + wide) continue;
      let y = rank.y + rank.high;
      for (const kind of KINDS) {
        const tall = rank.share[kind] ? parseInt(rank.share[kind][column], 36) / 35 * rank.high : 0;
        // Columns overlap by a fraction of a point, or gaps between them would show.
        if (tall > 0) { y -= tall; paint.fillStyle = fill(kind, 0); paint.fillRect(start, y, end - start + 0.4, tall); }
      }
    }
  }
  function shareLines(rank, seconds) {
    const lines = [];
    for (const [kind, text] of Object.entries(rank.share)) {
      const share = parseInt(text[Math.min(text.length - 1, Math.floor(seconds / whole * text.length))], 36) / 35;
      if (share > 0) lines.push(`${data.kinds[kind].name}: ${Math.round(100 * share)} %`);
    }
    return lines.length ? lines : ["idle"];
  }
  function ends(panel, i) {
    const { f, to } = panel.sent, source = panel.ranks[f[i]], target = panel.ranks[to[i]], down = to[i] > f[i];
    return [x(panel.sent.t[i]), source.y + (down ? source.high : 0), x(panel.sent.e[i]), target.y + (down ? 0 : target.high)];
  }
  function arrows(panel, top, tall) {
    const { t, e, w } = panel.sent, found = [];
    for (let i = 0; i < t.length && t[i] <= view.to; i++) if (e[i] >= view.from) found.push(i);
    if (found.length > MANY_ARROWS) return;
    paint.lineWidth = 1;
    for (const i of found) {
      const [x1, y1, x2, y2] = ends(panel, i);
      if (Math.max(y1, y2) < top || Math.min(y1, y2) > top + tall) continue;
      const ink = colour[{ f: "on", b: "back", p: "pass" }[w[i]]];
      paint.strokeStyle = paint.fillStyle = ink;
      paint.lineWidth = hover && hover.arrow === i && hover.panel === panel ? 2.5 : 1;
      paint.beginPath(); paint.moveTo(x1, y1); paint.lineTo(x2, y2); paint.stroke();
      if (found.length < 400) {
        const angle = Math.atan2(y2 - y1, x2 - x1);
        paint.beginPath(); paint.moveTo(x2, y2);
        for (const turn of [-0.42, 0.42]) paint.lineTo(x2 - 6 * Math.cos(angle + turn), y2 - 6 * Math.sin(angle + turn));
        paint.fill();
      }
    }
  }

  // ---- pointing ----
  function heldAt(rank, seconds) {
    return rank.memory.b[Math.max(0, above(rank.memory.t, seconds) - 1)];
  }
  function opAt(panel, rank, seconds, y) {
    for (let i = above(rank.t, seconds) - 1, tries = 0; i >= 0 && tries < 4; i--, tries++) {
      const half = +rank.h[i], upper = y < rank.y + rank.high / 2;
      if (rank.e[i] > seconds && (!half || (half === 1) === upper)) return i;
    }
    return -1;
  }
  function arrowAt(panel, place, y) {
    const { t, e } = panel.sent;
    let best = -1, least = 5, seen = 0;
    for (let i = 0; i < t.length && t[i] <= view.to && seen < MANY_ARROWS; i++) {
      if (e[i] < view.from) continue;
      seen++;
      const [x1, y1, x2, y2] = ends(panel, i), dx = x2 - x1, dy = y2 - y1;
      const along = Math.max(0, Math.min(1, ((place - x1) * dx + (y - y1) * dy) / (dx * dx + dy * dy || 1)));
      const far = Math.hypot(place - x1 - along * dx, y - y1 - along * dy);
      if (far < least) { least = far; best = i; }
    }
    return best;
  }
  function point(place, y) {
    if (place < left || place > left + wide) return null;
    const seconds = moment(place);
    for (const panel of data.panels) for (const rank of panel.ranks) {
      if (y >= rank.y && y < rank.y + rank.high) {
        if (rank.share) return { panel, lines: [`${rank.name} at ${duration(seconds)}`, ...shareLines(rank, seconds), ...memoryLine(rank, seconds)] };
        const [first, last] = visible(rank), crowded = last - first > 2 * wide;
        const i = opAt(panel, rank, seconds, y);
        if (crowded) return { panel, lines: [`${rank.name}: ${last - first} ops in view, drawn as shares of time`, `at ${duration(seconds)}; zoom in to see each`] };
        if (i >= 0) return opFacts(panel, rank, i);
        return seconds <= panel.makespan ? { panel, lines: [...idleLines(panel, rank, seconds), ...memoryLine(rank, seconds)] } : null;
      }
      if (rank.memory && y >= rank.y + rank.high && y < rank.y + rank.high + STRIP && arrowAt(panel, place, y) < 0)
        return { panel, lines: [`${rank.name} holds ${size(heldAt(rank, seconds))} at ${duration(seconds)}`,
          `peak ${size(rank.memory.peak)} at ${duration(rank.memory.at)}`, ...rank.memory.by.map(([name, count]) => `  ${name}: ${size(count)}`)] };
    }
    for (const panel of data.panels) {
      const i = arrowAt(panel, place, y), sent = panel.sent;
      if (i >= 0) return { panel, arrow: i, lines: [`${sent.o[i]} sent from rank ${sent.f[i]} to rank ${sent.to[i]}`,
        `${duration(sent.t[i])} to ${duration(sent.e[i])}: ${duration(sent.e[i] - sent.t[i])}`, ...(sent.b[i] ? [size(sent.b[i])] : [])] };
    }
    return null;
  }
  /** Why a rank is idle: what the op after the gap waits for. */
  function idleLines(panel, rank, seconds) {
    const next = above(rank.t, seconds), start = next ? Math.max(...rank.e.slice(Math.max(0, next - 2), next)) : 0;
    const end = next < rank.t.length ? rank.t[next] : panel.makespan;
    const lines = [`${rank.name} idle for ${duration(end - start)}`];
    if (next === rank.t.length) return [...lines, "has no more ops"];
    const now = (rank.idle || []).find(([from, to]) => from <= seconds && seconds < to);
    if (now) {
      const [from, to, cause, op, sender, bytes] = now, name = `${rank.s[next]}${rank.k[next]}${rank.n[next]}`;
      if (cause === "n") lines.push(`of these ${duration(to - from)} for the neighbour:`, `${name} waits for ${op}, which rank ${sender} still computes`);
      else if (cause === "l") lines.push(`of these ${duration(to - from)} for the link:`, `${name} waits for ${op}, on its way from rank ${sender}${bytes ? `, ${size(bytes)}` : ""}`);
      else lines.push(`of these ${duration(to - from)} for neither a neighbour nor a link`);
      return lines;
    }
    const wait = rank.waits && rank.waits[next];
    if (!wait) return lines;
    const [op, from, ended, arrived] = wait;
    lines.push(`${rank.s[next]}${rank.k[next]}${rank.n[next]} waits for ${op} of rank ${from}`);
    if (arrived > ended) lines.push(`which ends at ${duration(ended)} and arrives at ${duration(arrived)}`);
    else lines.push(`which ends at ${duration(ended)}`);
    return lines;
  }
  const memoryLine = (rank, seconds) => (rank.memory ? [`rank holds ${size(heldAt(rank, seconds))}`] : []);
  function opFacts(panel, rank, i) {
    const kind = rank.k[i], number = rank.n[i], what = kind === "U" ? `weight version ${number}` : `micro-batch ${number}`;
    return { panel, number, update: kind === "U", lines: [`${rank.s[i]}${kind}${number}  ${data.kinds[kind].name}`,
      `${rank.name}, stage ${rank.s[i]}, ${what}`,
      `${duration(rank.t[i])} to ${duration(rank.e[i])}: ${duration(rank.e[i] - rank.t[i])}`,
      ...(rank.h[i] === "0" ? [] : ["runs as one with the other half"]), ...(rank.path && rank.path.includes(i) ? ["on the critical path"] : []), ...(rank.b && rank.b[i] ? [`sends ${size(rank.b[i])}`] : []),
      ...memoryLine(rank, rank.t[i])] };
  }
  function show(event) {
    const box = canvas.getBoundingClientRect(), place = event.clientX - box.left, y = event.clientY - box.top;
    hover = y < canvas.clientHeight - AXIS ? point(place, y + frame.scrollTop) : null;
    tip.hidden = !hover;
    if (hover) {
      tip.textContent = hover.lines.join("\n");
      const near = figure.getBoundingClientRect();
      tip.style.left = `${Math.max(4, Math.min(event.clientX - near.left + 14, near.width - tip.offsetWidth - 6))}px`;
      const below = event.clientY - near.top + 18;
      tip.style.top = `${below + tip.offsetHeight > near.height ? Math.max(0, below - tip.offsetHeight - 32) : below}px`;
    }
    later();
  }
  const hide = () => { hover = null; tip.hidden = true; later(); };

  // ---- moving ----
  function look(from, to) {
    const span = Math.min(whole, Math.max(to - from, whole * 1e-7));
    from = Math.max(0, Math.min(from, whole - span));
    view = { from, to: from + span };
    later();
  }
  const zoom = (times, around) => {
    const at = around === undefined ? (view.from + view.to) / 2 : around;
    look(at - (at - view.from) / times, at + (view.to - at) / times);
  };
  const pan = (share) => { const by = share * (view.to - view.from); look(view.from + by, view.to + by); };
  const remember = () => {
    if (!wholePage) return;
    const all = view.from <= 0 && view.to >= whole;
    try { history.replaceState(null, "", all ? location.pathname + location.search : `#t=${view.from},${view.to}`); } catch { /* a sandbox */ }
  };
  function recall() {
    if (!wholePage) return;
    const found = /^#t=([0-9.e+-]+),([0-9.e+-]+)$/.exec(location.hash);
    if (found && +found[1] < +found[2]) look(+found[1], +found[2]);
  }
  const pathButton = figure.querySelector('button[data-do="path"]');
  /** A measured timeline has no path; its button would do nothing. */
  function arrangePath() {
    if (pathButton) pathButton.hidden = !data.panels.some((panel) => panel.ranks.some((rank) => rank.path && rank.path.length));
  }
  const DO = { in: () => zoom(1.6), out: () => zoom(1 / 1.6), all: () => look(0, whole), left: () => pan(-0.25), right: () => pan(0.25),
    path: () => { withPath = !withPath; pathButton.setAttribute("aria-pressed", String(withPath)); later(); } };
  const KEYS = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
  canvas.addEventListener("wheel", (event) => {
    const place = event.clientX - canvas.getBoundingClientRect().left;
    if (place < left) return; // over the names the page scrolls
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const amount = (sideways && event.deltaX) || event.deltaY;
    if (!sideways && amount > 0 && view.to - view.from >= whole) return; // all is in view: let the page scroll
    event.preventDefault();
    if (sideways) pan(amount / wide); else zoom(Math.exp(-Math.max(-120, Math.min(120, amount)) / 300), moment(place));
    remember();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0) { dragged = { place: event.clientX, ...view }; canvas.setPointerCapture(event.pointerId); hide(); }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged) { show(event); return; }
    const by = (dragged.place - event.clientX) / wide * (dragged.to - dragged.from);
    look(dragged.from + by, dragged.to + by);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { if (dragged) { dragged = null; remember(); } });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("dblclick", (event) => { zoom(2.5, moment(event.clientX - canvas.getBoundingClientRect().left)); remember(); });
  for (const button of figure.querySelectorAll("button")) button.addEventListener("click", () => { DO[button.dataset.do](); remember(); });
  (wholePage ? document : figure).addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    // In a form, these keys are for the form.
    if (event.target instanceof Element && event.target.closest("input, select, textarea, summary")) return;
    event.preventDefault(); DO[KEYS[event.key]](); remember();
  });
  frame.addEventListener("scroll", () => { hide(); later(); });
  window.addEventListener("resize", arrange);
  window.addEventListener("hashchange", recall);
  dark.addEventListener("change", () => { colours(); later(); });
  colours(); arrange(); arrangePath(); recall();
  function replaceData(next) {
    const all = view.from <= 0 && view.to >= whole;
    data = next; KINDS = Object.keys(data.kinds); whole = data.seconds || 1; hover = null; tip.hidden = true;
    if (all || view.to > whole) view = { from: 0, to: whole };
    arrange(); arrangePath();
  }
  return { show: replaceData };
}
for (const figure of document.querySelectorAll("figure.timeline")) {
  const data = figure.querySelector('script[type="application/json"]');
  if (data) penstockViewer(figure, JSON.parse(data.textContent));
}
