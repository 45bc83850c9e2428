// The schedule explorer. Prepared pictures first; a click loads Python (pyodide, from this site) and with it the package's own code.
(() => {
  const script = document.currentScript;
  const base = new URL("explorer/", script.src);
  const FIELDS = ["n", "forward", "backward", "weight", "latency"];
  const start = () => {
    const box = document.getElementById("explorer");
    const data = window.minimegExplorer;
    if (!box || !data) return;
    const of = (name) => box.querySelector(`[name=${name}]`);
    const picture = box.querySelector(".picture"), lines = box.querySelector(".lines"), state = box.querySelector(".state");
    const startButton = box.querySelector(".start"), own = box.querySelector(".own"), more = box.querySelector(".more");
    let python = null;

    const fill = (names) => {
      const chosen = of("name").value || "1f1b";
      of("name").replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    };
    const show = (page) => {
      box.classList.toggle("wrong", Boolean(page.error));
      lines.textContent = page.error || page.lines.join("\n");
      if (page.error) picture.replaceChildren();
      else if (page.svg) picture.innerHTML = page.svg;
      else {
        const image = new Image(760);
        image.src = page.src;
        image.alt = "Gantt chart of the schedule: " + page.lines.join("; ");
        picture.replaceChildren(image);
      }
    };
    const draw = () => {
      for (const name of ["p", "m", ...FIELDS]) box.querySelector(`output[for=x-${name}]`).value = of(name).value;
      if (python) {
        const values = [of("name").value, ...["p", "m", ...FIELDS].map((name) => Number(of(name).value))];
        show(JSON.parse(python.page(JSON.stringify(values))));
      } else {
        const key = `${of("name").value}-${of("p").value}-${of("m").value}`, page = data.said[key];
        show({ ...page, src: new URL(`${key}.svg`, base).href });
      }
      if (python) of("table").value ||= python.table("1f1b", 3, 4);
    };
    const load = async () => {
      startButton.disabled = true;
      const began = performance.now();
      try {
        state.textContent = "Loading Python (about 13 MB, from this site) …";
        const { loadPyodide } = await import(new URL("pyodide/pyodide.mjs", base).href);
        const home = new URL("pyodide/", base).href;
        const pyodide = await loadPyodide({ indexURL: home, packageBaseUrl: home });
        const packed = await fetch(new URL("minimeg.zip", base));
        if (!packed.ok) throw new Error(`minimeg.zip: ${packed.status}`);
        pyodide.unpackArchive(await packed.arrayBuffer(), "zip");
        pyodide.runPython(PYTHON);
        const call = (name) => pyodide.globals.get(name);
        python = { page: call("page"), own: call("own"), table: call("table") };
        fill(JSON.parse(call("names")()));
        of("p").max = 8;
        of("m").max = 24;
        more.hidden = own.hidden = false;
        startButton.hidden = true;
        state.textContent = `Python is running in this page; ready in ${((performance.now() - began) / 1000).toFixed(1)} s.`;
        box.dataset.ready = "yes";
        draw();
      } catch (error) {
        startButton.disabled = false;
        state.textContent = `Python could not be loaded (${error.message}); the prepared pictures stay.`;
      }
    };
    fill(data.names);
    if (!data.python) startButton.replaceWith("This copy of the site was built without Python for the browser.");
    else if (location.protocol === "file:")
      startButton.replaceWith("Browsers load no Python into a page opened as a file. Serve the folder: python -m http.server");
    else startButton.addEventListener("click", load);
    for (const control of box.querySelectorAll(".controls [name]")) control.addEventListener("input", draw);
    box.querySelector(".prove").addEventListener("click", () => show(JSON.parse(python.own(of("table").value))));
    box.hidden = false;
    document.getElementById("explorer-still")?.remove();
    draw();
  };
  const PYTHON = `
import json
from minimeg.lab.pages import schedule_page
from minimeg.schedule import NAMES, Schedule, build, prove, simulate

def names():
    return json.dumps(NAMES)

def page(values):
    name, p, m, n, forward, backward, weight, latency = json.loads(values)
    try:
        shown = schedule_page(name, p, m, n, forward, backward, weight, latency)
    except ValueError as error:
        return json.dumps({"error": str(error)})
    return json.dumps({"svg": shown.svg, "lines": shown.lines})

def own(table):
    try:
        schedule = Schedule.parse(table)
        proof = prove(schedule)
        line = simulate(schedule)
    except ValueError as error:
        return json.dumps({"error": str(error)})
    lines = [f"proven: {proof.messages} messages, no deadlock; in flight at the peak {proof.peak_in_flight}",
             f"makespan {line.makespan:g} slots, bubble {line.bubble_of_ideal:.4f} of ideal"]
    return json.dumps({"svg": line.svg(), "lines": lines})

def table(name, p, m):
    return str(build(name, p, m))
`;
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
