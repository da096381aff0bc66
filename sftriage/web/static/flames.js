// The flame graph: names the box under the pointer, moves between boxes by arrow keys, and replaces only the graph when
// another view is chosen. Without this script every box is a link with a tooltip.
"use strict";
(() => {
  const links = () => [...document.querySelectorAll("#flame-graph svg a")];
  const place = (link) => link.querySelector("rect").getBoundingClientRect();

  function say(link) {
    document.getElementById("flames-readout").textContent = link.querySelector("title").textContent.replace("\n", ": ");
  }

  // The nearest box in the direction of an arrow: above, below, or beside it in its row.
  function next(link, key) {
    const here = place(link);
    const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[key];
    let [best, least] = [null, Infinity];
    for (const other of links()) {
      const there = place(other);
      const [x, y] = [(there.left - here.left) * dx, (there.top - here.top) * dy];
      const level = dx ? Math.abs(there.top - here.top) < 2 : there.left < here.right - 1 && there.right > here.left + 1;
      const far = dx ? x : y + Math.abs(there.left - here.left) / 1e4;
      if (other !== link && level && (dx ? x > 0 : y > 0) && far < least) [best, least] = [other, far];
    }
    return best;
  }

  document.addEventListener("keydown", (event) => {
    const link = event.target.closest?.("#flame-graph svg a");
    if (!link || !event.key.startsWith("Arrow") || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    next(link, event.key)?.focus();
  });
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => {
      const box = event.target.closest?.("#flame-graph svg svg");
      const link = event.target.closest?.("#flame-graph svg a");
      if (link || box) say(link || box);
    });
  }

  // Shows another view, unless a later request overtook it.
  let requests = 0;
  async function show(address) {
    const request = ++requests;
    const answer = await fetch(address, { cache: "no-store" });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("flames");
    if (request !== requests) return "overtaken";
    if (!fresh) return "none";
    const open = document.getElementById("flames-table")?.open;
    const focused = document.activeElement?.closest("#flames .choices a")?.textContent;
    document.getElementById("flames").replaceWith(document.importNode(fresh, true));
    const same = [...document.querySelectorAll("#flames .choices a")].find((link) => link.textContent === focused);
    same?.focus({ preventScroll: true });
    const table = document.getElementById("flames-table");
    if (table) table.open = open;
    return "shown";
  }

  document.addEventListener("click", async (event) => {
    const link = event.target.closest?.("#flames a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    const [to, keyboard] = [new URL(link.getAttribute("href"), location.href), event.detail === 0];
    const became = await show(to).catch(() => "none");
    if (became === "overtaken") return;
    if (became === "none") return location.assign(to);
    history.pushState(null, "", to);
    if (keyboard) document.querySelector("#flame-graph svg a")?.focus({ preventScroll: true });
  });
  addEventListener("popstate", () => { if (document.getElementById("flames")) show(location.href).catch(() => location.reload()); });
})();
