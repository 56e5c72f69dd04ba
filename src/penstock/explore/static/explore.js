// The page of `penstock explore`: sends the form, and shows the answer.
"use strict";
{
  const form = document.getElementById("form"), results = document.querySelector(".results");
  const figure = document.getElementById("penstock-figure"), message = document.getElementById("file-message");
  // Lists with one value per rank grow and shrink with the number of ranks.
  const PER_RANK = ["forward", "backward", "input_grad", "weight_grad", "update", "activation_bytes", "weight_bytes"];
  // Milliseconds: a slider sends events faster than they are worth answering, and the sweep waits for a pause.
  const DEBOUNCE = 30, PAUSE = 350;
  let viewer = null, running = false, waiting = null, timer = 0, pause = 0, files = [];

  const input = (name) => document.getElementById(name);
  function formQuery() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (typeof value === "string" && value.trim()) query.append(name, value.trim());
    return query.toString();
  }

  // ---- answers ----
  function showProblems(problems) {
    for (const place of document.querySelectorAll(".problem[id]")) {
      const name = place.id.slice("problem-".length), text = problems[name] || "";
      place.textContent = text;
      const field = name && input(name);
      if (field) { if (text) field.setAttribute("aria-invalid", "true"); else field.removeAttribute("aria-invalid"); }
    }
    const unplaced = Object.entries(problems).filter(([name]) => name && !input(`problem-${name}`));
    if (unplaced.length) input("problem-").textContent = unplaced.map(([name, text]) => `${name}: ${text}`).join("; ");
    results.classList.toggle("outdated", Object.keys(problems).length > 0);
    for (const details of form.querySelectorAll("details")) if (details.querySelector("[aria-invalid]")) details.open = true;
  }
  function showFragment(name, html, rebuilt) {
    const place = input(name);
    if (!place) return;
    // The options of a schedule keep what is typed and the focus until another schedule is chosen.
    if (name.startsWith("options-") && !rebuilt && place.dataset.schedule === input(name.slice(-1)).value) return;
    if (name.startsWith("options-")) place.dataset.schedule = input(name.slice(-1)).value;
    if (place.innerHTML !== html) place.innerHTML = html;
  }
  function show(answer, rebuilt) {
    for (const [name, html] of Object.entries(answer.fragments || {})) showFragment(name, html, rebuilt);
    showProblems(answer.problems);
    if (Object.keys(answer.problems).length) return;
    history.replaceState(null, "", `/?${answer.query}${location.hash}`);
    draw(answer);
    clearTimeout(pause);
    pause = setTimeout(() => showMore(answer.query), PAUSE);
  }
  function draw(answer) {
    figure.hidden = !answer.data;
    if (answer.data) {
      figure.querySelector(".legend").innerHTML = answer.legend;
      figure.querySelector("canvas").setAttribute("aria-label", answer.label);
      if (viewer) viewer.show(answer.data); else viewer = penstockViewer(figure, answer.data);
    }
    input("milliseconds").textContent = `This answer took ${answer.milliseconds} ms.`;
  }
  async function showMore(query) {
    const answer = await get(`/more?${query}`);
    // The page may have moved on meanwhile.
    if (answer && answer.more !== undefined && location.search === `?${query}`) input("more").innerHTML = answer.more;
  }
  async function get(address, options) {
    try {
      const response = await fetch(address, options);
      if (response.headers.get("content-type").startsWith("application/json")) return await response.json();
      throw new Error(await response.text());
    } catch (error) {
      input("problem-").textContent = `The server does not answer (${error.message}): start penstock explore again.`;
      return null;
    }
  }

  // ---- requests ----
  /** Ask for the state of a query; while an answer is awaited, only the newest state is remembered. */
  async function update(query, rebuilt = false) {
    if (running) { waiting = [query, rebuilt]; return; }
    running = true;
    const busy = setTimeout(() => results.setAttribute("aria-busy", "true"), 150);
    const answer = await get(`/evaluate?${query}`);
    clearTimeout(busy);
    results.removeAttribute("aria-busy");
    running = false;
    if (answer && !waiting) show(answer, rebuilt);
    if (waiting) { const next = waiting; waiting = null; update(...next); }
  }
  function later() { clearTimeout(timer); timer = setTimeout(() => update(formQuery()), DEBOUNCE); }
  async function openFiles() {
    message.textContent = "reading …";
    const contents = await Promise.all(files.map(async (file) => [file.name, await file.text()]));
    const answer = await get(`/upload?${formQuery()}`, { method: "POST", body: JSON.stringify(contents) });
    if (!answer) { message.textContent = ""; return; }
    message.textContent = answer.problem || answer.message;
    message.classList.toggle("problem", Boolean(answer.problem));
    if (answer.problem) return;
    for (const [name, text] of Object.entries(answer.inputs)) if (input(name)) setInput(input(name), text);
    update(answer.query, true);
  }

  // ---- the form ----
  function setInput(field, text) {
    field.value = text;
    const slider = form.querySelector(`[data-for="${field.id}"]`);
    if (slider) slider.value = text;
    const details = field.closest("details");
    if (details && text && field.tagName === "INPUT" && field.type !== "number") details.open = true;
  }
  function resizeLists() {
    const ranks = Number(input("ranks").value);
    if (!Number.isInteger(ranks) || ranks < 1 || ranks > 64) return;
    for (const name of [...PER_RANK, "boundary_bytes"]) {
      const values = input(name).value.split(","), count = name === "boundary_bytes" ? ranks - 1 : ranks;
      if (values.length > 1 && count > 0)
        input(name).value = Array.from({ length: count }, (_, index) => values[Math.min(index, values.length - 1)]).join(",");
    }
  }
  form.addEventListener("input", (event) => {
    const field = event.target;
    if (field.id === "files") return;
    if (field.dataset.for) input(field.dataset.for).value = field.value;
    const slider = form.querySelector(`[data-for="${field.id}"]`);
    if (slider) slider.value = field.value;
    if (field.id === "a" || field.id === "b") input(`options-${field.id}`).replaceChildren();
    const cut = field.id || field.dataset.for;
    // A profile is cut again; other lists get as many values as there are ranks.
    if (files.length && (cut === "ranks" || cut === "micro_batches")) { clearTimeout(timer); timer = setTimeout(openFiles, 150); return; }
    if (cut === "ranks") resizeLists();
    later();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); update(formQuery()); });
  input("files").addEventListener("change", (event) => { files = [...event.target.files]; if (files.length) openFiles(); });
  input("per-rank").addEventListener("click", () => {
    const ranks = Number(input("ranks").value) || 1;
    for (const name of ["forward", "backward"]) {
      const text = input(name).value.trim();
      if (text && !text.includes(",")) input(name).value = Array(ranks).fill(text).join(",");
    }
    input("forward").focus();
    later();
  });
  async function copy(button, text) {
    const usual = button.textContent;
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select and copy it"; }
    setTimeout(() => { button.textContent = usual; }, 1500);
  }
  input("copy-link").addEventListener("click", (event) => copy(event.target, location.href));
  results.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button, button.parentElement.querySelector("code").textContent);
  });

  // On a phone, the figure is not far below the form.
  if (matchMedia("(max-width:900px)").matches)
    for (const group of form.querySelectorAll("details.group")) group.open = false;
  for (const name of ["a", "b"]) input(`options-${name}`).dataset.schedule = input(name).value;
  // A link with problems shows its messages, and the figures of the fields without.
  let loaded = true;
  for (const place of document.querySelectorAll(".problem[id]")) {
    if (!place.textContent.trim()) continue;
    loaded = false;
    const field = input(place.id.slice("problem-".length));
    if (field) field.setAttribute("aria-invalid", "true");
    for (let group = place.closest("details"); group; group = group.parentElement.closest("details")) group.open = true;
  }
  if (loaded) update(formQuery()); else get(`/evaluate?${form.dataset.query}`).then((answer) => { if (answer) draw(answer); });
}
