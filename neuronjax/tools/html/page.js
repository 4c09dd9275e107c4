"use strict";
for (const section of document.querySelectorAll("section")) {
  const table = section.querySelector("table");
  if (!table) continue;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];

  // Numbers by value, largest first; words by the alphabet. A second click turns round.
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = cell.dataset.value;
    return number === undefined ? cell.textContent.trim() : Number(number);
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const numeric = rows.length && rows[0].cells[column].dataset.value !== undefined;
      const before = head.getAttribute("aria-sort");
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const order = before === first ? second : first;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const compare = (a, b) =>
        numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
      const sorted = [...rows].sort(
        (a, b) => sign * compare(value(a, column), value(b, column)),
      );
      body.append(...sorted);
    });
  });

  const search = section.querySelector("input");
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });

  // What is pointed at in the table, graph or roofline is marked in all three.
  const marked = [...section.querySelectorAll("[data-row]")];
  for (const element of marked) {
    element.addEventListener("mouseenter", () => {
      for (const other of marked) {
        const same = other.dataset.row === element.dataset.row;
        other.classList.toggle("nj-picked", same);
      }
    });
    element.addEventListener("mouseleave", () => {
      for (const other of marked) other.classList.remove("nj-picked");
    });
  }
}
