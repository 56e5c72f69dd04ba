// Sorts the table by the column whose head is clicked; a second click turns it round.
"use strict";
(() => {
  const table = document.querySelector("table.all"), heads = [...table.querySelectorAll("th")], body = table.tBodies[0];
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const words = (row) => row.cells[place].textContent;
    const compare = (one, other) => parseFloat(words(one)) - parseFloat(words(other)) || words(one).localeCompare(words(other));
    const rows = [...body.rows].sort((one, other) => (up ? 1 : -1) * compare(one, other));
    body.append(...rows);
  }));
})();
