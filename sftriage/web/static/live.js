// Keeps the page up to date: when the server announces a change, the parts that differ are replaced from a fresh copy.
"use strict";
(() => {
  const MIN_BETWEEN_MS = 1000;
  const REFUSED_MS = 10000;
  const link = document.getElementById("link");
  let shown = document.body.dataset.version;
  let wanted = shown;
  let busy = false;

  function say(state, text) {
    if (link.dataset.state === state) return;
    link.dataset.state = state;
    link.querySelector(".text").textContent = text;
  }

  const parts = (page) => [...page.querySelectorAll("main > section, main [data-live]")].map((part) => part.id).join(" ");

  // Replaces a part if it differs, and keeps open details, scroll positions and the keyboard focus.
  function replace(old, fresh) {
    const now = document.importNode(fresh, true);
    const inside = old.contains(document.activeElement) ? document.activeElement : null;
    const known = [...old.querySelectorAll("details")].map((details) => details.id);
    const open = [...old.querySelectorAll("details[open]")].map((details) => details.id);
    for (const details of now.querySelectorAll("details")) {
      if (known.includes(details.id)) details.open = open.includes(details.id);
    }
    const scrolled = [...old.querySelectorAll(".scroll")].map((region) => region.scrollLeft);
    old.replaceWith(now);
    now.querySelectorAll(".scroll").forEach((region, n) => { region.scrollLeft = scrolled[n] || 0; });
    if (!inside) return;
    copying();
    const name = inside.hasAttribute("href") ? "href" : "aria-label";
    const again = inside.id ? document.getElementById(inside.id)
      : [...now.querySelectorAll(`[${name}]`)].find((link) => link.getAttribute(name) === inside.getAttribute(name));
    again?.focus({ preventScroll: true });
  }

  // Ages go on by the server's clock, whatever the browser's clock says.
  let ahead = Date.now() / 1e3 - Number(document.body.dataset.now);

  function count() {
    for (const age of document.querySelectorAll(".ago")) {
      const passed = Math.max(0, Date.now() / 1e3 - ahead - Number(age.dataset.time));
      const [unit, seconds] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([name, per]) => name === "s" || passed >= 2 * per);
      const text = `${(passed / seconds).toFixed(0)} ${unit} ago`;
      if (age.textContent !== text) age.textContent = text;
    }
  }

  function put(fresh) {
    // "/" has gone on to another run: nothing of what is shown stays.
    if (fresh.body.dataset.root !== document.body.dataset.root) return location.reload();
    const before = document.getElementById("headline")?.textContent;
    ahead = Date.now() / 1e3 - Number(fresh.body.dataset.now);
    // A page that grows a part that it did not have (with the first window, say) is laid out anew.
    if (parts(fresh) !== parts(document)) {
      document.getElementById("main").replaceChildren(...document.importNode(fresh.getElementById("main"), true).childNodes);
    }
    for (const old of document.querySelectorAll("[data-live]")) {
      const now = fresh.getElementById(old.id);
      if (now && !now.isEqualNode(old)) replace(old, now);
    }
    document.title = fresh.title;
    document.body.dataset.version = fresh.body.dataset.version;
    document.body.dataset.now = fresh.body.dataset.now;
    // A screen reader announces the headline when it changes, and nothing else.
    const after = document.getElementById("headline")?.textContent;
    if (after && after !== before) document.getElementById("spoken").textContent = after;
    count();
    document.dispatchEvent(new Event("shown"));
  }

  async function refresh() {
    if (busy || wanted === shown) return;
    busy = true;
    const taking = wanted;
    try {
      const answer = await fetch(location.href, { cache: "no-store" });
      if (answer.headers.get("content-type")?.startsWith("text/html")) {
        put(new DOMParser().parseFromString(await answer.text(), "text/html"));
        shown = taking;
      }
    } catch {
      // The stream says when the server is there again.
    }
    setTimeout(() => { busy = false; refresh(); }, MIN_BETWEEN_MS);
  }

  // Adds a copy button to each command.
  function copying() {
    for (const command of document.querySelectorAll(".command:not(:has(button))")) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy: ${command.textContent}`);
      command.append(button);
    }
  }
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.(".command button");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      button.textContent = "Marked";
    }
  });
  document.addEventListener("shown", copying);
  copying();

  setInterval(count, 10000);
  // A page of a chosen run has events of its own; "/" follows the newest run.
  const root = location.pathname.match(/^\/runs\/[^/]+(?=\/)/)?.[0] ?? "";
  let events;
  function listen() {
    events = new EventSource(`${root}/events`);
    events.addEventListener("change", (event) => {
      say("on", "live");
      wanted = JSON.parse(event.data).version;
      refresh();
    });
    events.addEventListener("open", () => say("on", "live"));
    events.addEventListener("error", () => {
      say("lost", "connection lost, trying again");
      // Browsers try again by themselves, but not where they were turned away (too many pages listen).
      if (events.readyState === EventSource.CLOSED) setTimeout(listen, REFUSED_MS);
    });
  }
  listen();
  addEventListener("pagehide", () => events.close());
})();
