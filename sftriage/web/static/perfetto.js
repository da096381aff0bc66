// Hands a trace to Perfetto's viewer: opens it, pings until it answers, then posts the bytes (its documented deep link).
// The trace goes from this page to that window inside the browser; it is not uploaded.
"use strict";
(() => {
  const VIEWER = "https://ui.perfetto.dev";
  const PING_EVERY_MS = 100;
  const PATIENCE_MS = 30000;

  function answered(viewer) {
    return new Promise((resolve, reject) => {
      const pings = setInterval(() => viewer.postMessage("PING", VIEWER), PING_EVERY_MS);
      const end = (how, value) => {
        clearInterval(pings);
        clearTimeout(patience);
        removeEventListener("message", hear);
        how(value);
      };
      const hear = (event) => {
        if (event.origin === VIEWER && event.source === viewer && event.data === "PONG") end(resolve);
      };
      const patience = setTimeout(() => end(reject, new Error("Perfetto did not answer. Is this browser online?")), PATIENCE_MS);
      addEventListener("message", hear);
    });
  }

  async function bytesOf(address) {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error("The trace could not be read.");
    return answer.arrayBuffer();
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("#perfetto");
    if (!button) return;
    const { trace, name, title } = button.dataset;
    const say = (text) => { document.getElementById("perfetto-status").textContent = text; };
    // Only while the click lasts may a window be opened.
    const viewer = open(VIEWER);
    if (!viewer) {
      say("The browser blocked a new window. Allow it, or download the trace and open it there.");
      return;
    }
    button.disabled = true;
    say("Waiting for Perfetto…");
    try {
      const [buffer] = await Promise.all([bytesOf(trace), answered(viewer)]);
      viewer.postMessage({ perfetto: { buffer, title, fileName: name } }, VIEWER);
      say("Handed to Perfetto.");
    } catch (error) {
      say(`${error.message} You can download the trace and open it in any copy of the viewer.`);
    } finally {
      button.disabled = false;
    }
  });
})();
