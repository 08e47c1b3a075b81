"use strict";
(() => {
  const root = document.documentElement, one = (q, at = document) => at.querySelector(q), all = (q, at = document) => [...at.querySelectorAll(q)];
  const data = JSON.parse(one("#data").textContent);
  const number = v => v === null ? "no data" : typeof v === "string" ? v : Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4));

  // Light or dark: the reader's choice, else that of the system.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const stored = { get: () => { try { return localStorage.getItem("firstnan-theme"); } catch { return null; } }, set: v => { try { localStorage.setItem("firstnan-theme", v); } catch { /* private window */ } } };
  if (stored.get() === "light" || stored.get() === "dark") root.dataset.theme = stored.get();
  const toggle = () => { root.dataset.theme = isDark() ? "light" : "dark"; stored.set(root.dataset.theme); redraw(); };
  one("#theme").addEventListener("click", toggle);
  system.addEventListener("change", () => redraw());

  // Contents, and moving between sections by keys.
  const sections = all("main > section"), links = sections.map(section => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = "#" + section.id; link.textContent = section.dataset.name;
    item.append(link); one("#contents").append(item); return link;
  });
  let here = 0;
  const mark = at => { here = at; links.forEach((link, i) => { link.classList.toggle("here", i === at); if (i === at) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); }); };
  const go = at => { const to = Math.max(0, Math.min(sections.length - 1, at)); sections[to].focus({ preventScroll: true }); sections[to].scrollIntoView(); mark(to); };
  addEventListener("scroll", () => {
    const passed = sections.filter(s => s.getBoundingClientRect().top < innerHeight * .3).length - 1;
    mark(innerHeight + scrollY >= document.body.scrollHeight - 4 ? Math.max(here, passed) : Math.max(0, passed));
  }, { passive: true });
  mark(0);
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    const focused = sections.indexOf(document.activeElement.closest("main > section")), from = focused < 0 ? here : focused;
    if (event.key === "j") go(from + 1); else if (event.key === "k") go(from - 1); else if (event.key === "t") toggle(); else return;
    event.preventDefault();
  });

  // Copying.
  const say = text => { const at = one("#said"); at.textContent = text; at.classList.add("on"); setTimeout(() => at.classList.remove("on"), 1600); };
  const copy = async text => {
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.createElement("textarea"); area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
    say("Copied");
  };
  one("#copy-markdown").addEventListener("click", () => copy(JSON.parse(one("#markdown").textContent)));
  all("button.copy").forEach(button => button.addEventListener("click", () => copy(button.dataset.copy)));

  // The number under the pointer in a heat map.
  all("[data-heat]").forEach(figure => {
    const heat = data.heat[+figure.dataset.heat], map = one(".map", figure), told = one("output", figure);
    const at = event => {
      const box = map.getBoundingClientRect(), cell = (v, n) => Math.max(0, Math.min(n - 1, Math.floor(v * n)));
      const column = cell((event.clientX - box.left) / box.width, heat.steps.length), row = cell((event.clientY - box.top) / box.height, heat.layers.length);
      told.textContent = `${heat.layers[row]}, step ${heat.steps[column]}: ${number(heat.values[row][column])}`;
    };
    map.addEventListener("pointermove", at); map.addEventListener("pointerdown", at);
    map.addEventListener("pointerleave", () => { told.textContent = ""; });
  });

  // Curves to zoom into, where plotly came with the page; the drawings stay if anything about it fails.
  const packed = one("#plotly"), drawn = new Set();
  const figures = all("[data-series]");
  let loading = null;
  const load = () => loading ||= (async () => {
    const bytes = Uint8Array.from(atob(packed.textContent), c => c.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script); packed.remove();
    return window.Plotly;
  })();
  const color = name => { const probe = document.createElement("i"); probe.style.color = `var(--${name})`; document.body.append(probe); const found = getComputedStyle(probe).color; probe.remove(); return found; };
  const draw = async figure => {
    const plotly = await load(), series = data.series[+figure.dataset.series], plot = one(".plot", figure);
    if (!plotly) return;
    const finite = series.values.filter(v => typeof v === "number"), low = Math.min(...finite), high = Math.max(...finite), log = low > 0 && high / low > 50;
    const soft = color("soft"), line = color("line"), bad = color("bad"), accent = color("accent");
    const trace = (x, y, more) => ({ x, y, mode: "lines", line: { color: accent, width: 2 }, hovertemplate: "step %{x}: %{y:.5g}<extra></extra>", ...more });
    const traces = [trace(series.steps, series.values.map(v => typeof v === "number" ? v : null), { connectgaps: false })];
    if (series.steps.length < 60) Object.assign(traces[0], { mode: "lines+markers", marker: { size: 4 } });
    if (series.forecast.length) traces.push(trace(series.forecast.map(p => p[0]), series.forecast.map(p => p[1]), { line: { color: accent, width: 2, dash: "dot" } }));
    const lost = series.steps.filter((_, i) => typeof series.values[i] === "string");
    if (lost.length) traces.push(trace(lost, lost.map(() => high), { mode: "markers", marker: { symbol: "x", size: 9, color: bad }, hovertemplate: "step %{x}: not finite<extra></extra>" }));
    const axis = { gridcolor: line, zeroline: false, tickfont: { color: soft, size: 11 }, linecolor: line, automargin: true };
    const marked = data.trip === null ? {} : { shapes: [{ type: "line", x0: data.trip, x1: data.trip, y0: 0, y1: 1, yref: "paper", line: { color: bad, width: 1.3, dash: "dot" } }], annotations: [{ x: data.trip, y: 0, yref: "paper", text: `step ${data.trip}`, showarrow: false, xanchor: "right", yanchor: "bottom", font: { color: bad, size: 11 } }] };
    const missing = log ? 0 : (Math.max(Math.abs(low), Math.abs(high)) * .02 || 1) - (high - low);
    const height = plot.getBoundingClientRect().height || 190;
    const layout = { height: Math.max(height, 170), margin: { l: 48, r: 14, t: 10, b: 28 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: "zoom", hovermode: "x", font: { family: getComputedStyle(document.body).fontFamily, color: soft }, xaxis: { ...axis, showgrid: false }, yaxis: { ...axis, type: log ? "log" : "linear", exponentformat: "e", ...(log ? { dtick: Math.max(1, Math.ceil(Math.log10(high / low) / 4)) } : { nticks: 5, ...(missing > 0 ? { range: [low - missing / 2, high + missing / 2] } : {}) }) }, ...marked };
    if (!drawn.has(figure)) plot.replaceChildren();
    drawn.add(figure);
    await plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true, scrollZoom: false });
    figure.dataset.drawn = "true";
  };
  const redraw = () => drawn.forEach(figure => draw(figure));
  if (packed && "DecompressionStream" in window && "IntersectionObserver" in window) {
    const seen = new IntersectionObserver(entries => entries.filter(e => e.isIntersecting).forEach(e => { seen.unobserve(e.target); draw(e.target).catch(error => console.warn("firstnan: curves stay as they are:", error)); }), { rootMargin: "300px" });
    figures.forEach(figure => seen.observe(figure));
  }
  root.dataset.ready = "true";
})();
