// Adds to the static content of a report: sorting and filtering of tables, copying of commands, and the current part
// in the contents list. Nothing is read from the network.
"use strict";
(() => {
  /** Compares two cells: numbers by value, texts by language, empty cells last in both directions. */
  function compareCells(first, second, direction) {
    const firstText = first.textContent.trim(), secondText = second.textContent.trim();
    if (!firstText || !secondText) return Number(!firstText) - Number(!secondText);
    const firstKey = first.dataset.key, secondKey = second.dataset.key;
    if (firstKey !== undefined && secondKey !== undefined) return direction * (Number(firstKey) - Number(secondKey));
    // Numbers stand before texts such as "failed".
    if (firstKey !== undefined || secondKey !== undefined) return firstKey === undefined ? 1 : -1;
    return direction * firstText.localeCompare(secondText, undefined, { numeric: true });
  }

  function sortTable(table, column) {
    const headers = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    const ascending = headers[column].getAttribute("aria-sort") !== "ascending";
    for (const header of headers) header.removeAttribute("aria-sort");
    headers[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = [...body.rows];
    rows.sort((first, second) => compareCells(first.cells[column], second.cells[column], ascending ? 1 : -1));
    body.append(...rows);
  }

  function makeSortable(table) {
    if (table.tBodies[0].rows.length < 2) return;
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sortTable(table, column));
    });
  }

  function addFilter(block) {
    const rows = [...block.querySelectorAll("tbody tr")];
    const bar = document.createElement("div"), label = document.createElement("label");
    const input = document.createElement("input"), count = document.createElement("span");
    bar.className = "filter";
    input.type = "search";
    count.setAttribute("role", "status");
    label.append("Filter rows ", input);
    bar.append(label, count);
    block.querySelector(".scroll").before(bar);
    function apply() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += Number(!row.hidden);
      }
      count.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    }
    input.addEventListener("input", apply);
    apply();
  }

  async function copyText(pre) {
    try {
      await navigator.clipboard.writeText(pre.textContent);
      return true;
    } catch {
      // Pages opened from a file may not use the clipboard: select the text, so that a key copies it.
      const range = document.createRange();
      range.selectNodeContents(pre);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      return document.execCommand("copy");
    }
  }

  function addCopyButton(block) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-live", "polite");
    block.classList.add("has-button");
    block.append(button);
    button.addEventListener("click", async () => {
      button.textContent = (await copyText(block.querySelector("pre"))) ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  /** Marks the part that is in view in the contents list. */
  function followScrolling() {
    const links = new Map();
    for (const link of document.querySelectorAll("nav a")) links.set(link.getAttribute("href").slice(1), link);
    const parts = [...document.querySelectorAll("article, section")].filter((part) => links.has(part.id));
    let current = null;
    function update() {
      const part = parts.filter((candidate) => candidate.getBoundingClientRect().top < 120).pop();
      const link = part ? links.get(part.id) : null;
      if (link === current) return;
      if (current) current.removeAttribute("aria-current");
      if (link) link.setAttribute("aria-current", "true");
      current = link;
    }
    let queued = false;
    addEventListener("scroll", () => {
      if (queued) return;
      queued = true;
      requestAnimationFrame(() => { queued = false; update(); });
    }, { passive: true });
    update();
  }

  document.querySelectorAll(".table table").forEach(makeSortable);
  document.querySelectorAll(".table[data-filter]").forEach(addFilter);
  document.querySelectorAll(".code").forEach(addCopyButton);
  followScrolling();
  const contents = document.getElementById("contents");
  if (!matchMedia("(min-width: 1000px)").matches) contents.open = false;
  // Explanations that are closed on the screen are printed.
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
