"use strict";

// Columns are sorted by the numbers that cells show, whatever their units, else by text; a second time the other way.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    header.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const isNumber = header.classList.contains("number");
      const first = isNumber ? "descending" : "ascending";
      const second = isNumber ? "ascending" : "descending";
      const order = header.getAttribute("aria-sort") === first ? second : first;
      for (const other of headers) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => {
        const cell = row.cells[column];
        return isNumber ? Number(cell.dataset.value ?? "-Infinity") : cell.textContent;
      };
      const compare = isNumber
        ? (a, b) => (a === b ? 0 : a < b ? -1 : 1)
        : (a, b) => a.localeCompare(b, undefined, { numeric: true });
      const rows = [...body.rows].map((row) => [key(row), row]);
      rows.sort(([a], [b]) => sign * compare(a, b));
      body.append(...rows.map(([, row]) => row));
    });
  });
}
