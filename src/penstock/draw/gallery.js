// Sorts the groups of the table by the column whose head is clicked, a second click turns them round;
// and shows only schedules with the words of the box.
"use strict";
(() => {
  const table = document.querySelector("table.all"), heads = [...table.querySelectorAll("thead th")];
  const rowsOf = (body) => [...body.rows].filter((row) => row.dataset.section !== undefined);
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const words = (row) => row.cells[place].textContent;
    const compare = (one, other) => parseFloat(words(one)) - parseFloat(words(other)) || words(one).localeCompare(words(other));
    for (const body of table.tBodies) body.append(...rowsOf(body).sort((one, other) => (up ? 1 : -1) * compare(one, other)));
  }));
  const box = document.querySelector(".filter");
  box.hidden = false;
  box.querySelector("input").addEventListener("input", (event) => {
    const filterWords = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const body of table.tBodies) {
      let shown = 0;
      for (const row of rowsOf(body)) {
        const section = document.getElementById(row.dataset.section);
        const text = `${row.textContent} ${body.rows[0].textContent} ${section.querySelector("p").textContent}`.toLowerCase();
        row.hidden = section.hidden = !filterWords.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      body.hidden = !shown;
    }
  });
})();
