'use strict';
(() => {
  const root = document.documentElement;
  const theme = document.getElementById('theme');
  const prefersDark = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => root.dataset.theme ? root.dataset.theme === 'dark' : prefersDark.matches;
  const label = () => { theme.textContent = isDark() ? 'Light colours' : 'Dark colours'; };
  theme.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    label();
  });
  prefersDark.addEventListener('change', label);
  label();
  theme.hidden = false;

  // Returns the order of two cells: numbers by value, a missing number last, texts by their text.
  const compare = (a, b, numeric, direction) => {
    if (!numeric) return direction * a.textContent.localeCompare(b.textContent);
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    return direction * (Number(x) - Number(y));
  };
  for (const table of document.querySelectorAll('table.sortable')) {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = heading.textContent;
      heading.replaceChildren(button);
      button.addEventListener('click', () => {
        const ascending = heading.getAttribute('aria-sort') !== 'ascending';
        for (const other of headings) other.removeAttribute('aria-sort');
        heading.setAttribute('aria-sort', ascending ? 'ascending' : 'descending');
        const numeric = heading.classList.contains('number');
        const rows = [...body.rows];
        rows.sort((a, b) =>
          compare(a.cells[column], b.cells[column], numeric, ascending ? 1 : -1));
        body.append(...rows);
      });
    });
  }
  for (const filters of document.querySelectorAll('.filters')) {
    const body = document.getElementById(filters.dataset.for).tBodies[0];
    const text = filters.querySelector('input');
    const choice = filters.querySelector('select');
    const output = filters.querySelector('output');
    const apply = () => {
      const wanted = text.value.trim().toLowerCase();
      let shown = 0;
      for (const row of body.rows) {
        let fits = row.textContent.toLowerCase().includes(wanted);
        if (choice && choice.value) {
          const own = 'outcome' in choice.dataset
            ? row.dataset.outcome
            : row.cells[Number(choice.dataset.column)].textContent;
          fits = fits && own === choice.value;
        }
        row.hidden = !fits;
        shown += fits;
      }
      output.textContent = `${shown} of ${body.rows.length} rows`;
    };
    text.addEventListener('input', apply);
    if (choice) choice.addEventListener('change', apply);
    apply();
    filters.hidden = false;
  }
})();
