// Reads a chart aloud and in words: by pointer or by arrow keys, column by column, and on the map row by row.
"use strict";
(() => {
  const levels = new Map();
  const LEVELS = 254;
  const UNKNOWN = 255;

  const ms = (seconds) => (seconds >= 0.1 ? (seconds * 1e3).toFixed(0) : (seconds * 1e3).toFixed(1)) + " ms";
  const steps = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);

  function say(cursor, name, text, column) {
    document.getElementById(`${name}-readout`).textContent = text;
    cursor.setAttribute("aria-valuetext", text);
    cursor.setAttribute("aria-valuenow", column);
  }

  function timeline(cursor, column) {
    const figure = cursor.closest("figure");
    const here = cursor.querySelector(".here");
    here.setAttribute("x", (column * 1000) / (Number(cursor.getAttribute("aria-valuemax")) + 1));
    here.setAttribute("visibility", "visible");
    const found = JSON.parse(figure.dataset.columns).find(([at, width]) => at <= column && column < at + width);
    if (!found) return say(cursor, "timeline", "no window here: the job was not watched, or nothing was recorded", column);
    const [, , first, last, label, named, exposed, advances] = found;
    const parts = JSON.parse(figure.dataset.stages).map((stage, n) => `${stage} ${ms(advances[n])}`);
    say(cursor, "timeline", `${steps(first, last)}: ${label}${named ? `, ${named}` : ""}; ${ms(exposed)}, mean of a step: ${parts.join(", ")}`, column);
  }

  // The cells of the map, a byte each; null if there is none.
  function levelsOf(address) {
    if (!levels.has(address)) {
      levels.clear();
      levels.set(address, fetch(address).then(async (answer) => (answer.ok ? new Uint8Array(await answer.arrayBuffer()) : null)));
    }
    return levels.get(address);
  }

  // From in time to latest: transparent, amber, orange, red, on light and dark ground. Grey is unknown.
  const RAMP = [[0, 255, 213, 79, 0], [0.25, 255, 193, 7, 150], [0.6, 244, 81, 30, 235], [1, 183, 28, 28, 255]];
  const COLOURS = Array.from({ length: LEVELS + 1 }, (_, level) => {
    const at = level / LEVELS;
    const n = RAMP.findIndex(([stop]) => at <= stop) || 1;
    const [[low, ...from], [high, ...to]] = [RAMP[n - 1], RAMP[n]];
    return from.map((value, i) => value + ((to[i] - value) * (at - low)) / (high - low));
  });
  COLOURS[UNKNOWN] = [128, 128, 128, 70];

  async function draw() {
    const canvas = document.querySelector("#heat canvas");
    const bytes = canvas && await levelsOf(canvas.closest("figure").dataset.heat);
    if (!bytes) return;
    const [at, width] = [Number(canvas.closest("figure").dataset.at), Number(canvas.closest("figure").dataset.width)];
    if (bytes.length !== width * canvas.height) return;
    const picture = new ImageData(width, canvas.height);
    bytes.forEach((level, cell) => picture.data.set(COLOURS[level], 4 * cell));
    const context = canvas.getContext("2d");
    // Earlier attempts and unfinished steps are unknown.
    context.fillStyle = "rgb(128 128 128 / 27%)";
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.putImageData(picture, at, 0);
  }
  document.addEventListener("shown", draw);
  draw();

  async function heat(cursor, column, row) {
    const about = cursor.closest("figure").dataset;
    const [at, columns, each] = [Number(about.at), Number(about.width), Number(about.each)];
    const here = cursor.querySelector(".here");
    here.setAttribute("x", column);
    here.setAttribute("y", row);
    here.setAttribute("visibility", "visible");
    if (column < at || column >= at + columns) return say(cursor, "heat", "not on the map: an earlier attempt of the job, or not over yet", column);
    const bytes = await levelsOf(about.heat);
    if (!bytes) return;
    const level = bytes[row * columns + column - at];
    const first = Number(about.first) + (column - at) * each;
    const rank = row * Number(about.rowRanks);
    const until = Math.min(rank + Number(about.rowRanks), Number(about.ranks)) - 1;
    const ranks = rank === until ? `rank ${rank}` : `the latest of ranks ${rank} to ${until}`;
    const late = level === UNKNOWN ? "not known"
      : `${ms((level / LEVELS) * Number(about.scale))}${level === LEVELS ? " or more" : ""} late`;
    say(cursor, "heat", `${steps(first, Math.min(first + each - 1, Number(about.last)))}, ${ranks}: ${late}`, column);
  }

  const shows = { timeline, heat };
  // Both charts have the same axis, so both cursors move together. The row is the map's, at first that of the latest rank.
  const place = [Infinity, null];

  function show(cursor, column, row) {
    const columns = Number(cursor.getAttribute("aria-valuemax")) + 1;
    const map = document.querySelector("#heat figure")?.dataset ?? { rows: 1, row: 0 };
    place[0] = Math.min(Math.max(column, 0), columns - 1);
    place[1] = Math.min(Math.max(row ?? Number(map.row), 0), Number(map.rows) - 1);
    for (const chart of document.querySelectorAll("[data-cursor]")) shows[chart.dataset.cursor](chart, ...place);
  }

  document.addEventListener("pointermove", (event) => {
    const cursor = event.target.closest?.("[data-cursor]");
    if (!cursor) return;
    const box = cursor.getBoundingClientRect();
    const columns = Number(cursor.getAttribute("aria-valuemax")) + 1;
    const rows = Number(cursor.closest("figure").dataset.rows || 1);
    const row = cursor.dataset.cursor === "heat" ? Math.floor(((event.clientY - box.top) / box.height) * rows) : place[1];
    show(cursor, Math.floor(((event.clientX - box.left) / box.width) * columns), row);
  });
  document.addEventListener("keydown", (event) => {
    const cursor = event.target.closest?.("[data-cursor]");
    if (!cursor || event.ctrlKey || event.altKey || event.metaKey) return;
    const [column, row] = [place[0], place[1] ?? Number(document.querySelector("#heat figure")?.dataset.row ?? 0)];
    const from = Number.isFinite(column) ? column : Number(cursor.getAttribute("aria-valuemax"));
    const moved = {
      ArrowLeft: [from - 1, row], ArrowRight: [from + 1, row], ArrowUp: [from, row - 1], ArrowDown: [from, row + 1],
      PageUp: [from - 20, row], PageDown: [from + 20, row], Home: [0, row], End: [Infinity, row],
    }[event.key];
    if (!moved) return;
    event.preventDefault();
    show(cursor, ...moved);
  });
})();
