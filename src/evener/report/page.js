"use strict";
(() => {
  const spec = JSON.parse(document.getElementById("data").textContent);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const node = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text; // never markup: names and logs are other people's
    return made;
  };
  const size = v => v >= 2 ** 30 ? (v / 2 ** 30).toFixed(2) + " GiB" : (v / 2 ** 20).toFixed(0) + " MiB";
  const words = (v, unit) => {
    if (v === null || v === undefined) return "–";
    if (unit === "bytes") return size(v);
    const a = Math.abs(v);
    const s = a !== 0 && (a < 1e-3 || a >= 1e6) ? v.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e") : String(+v.toPrecision(5));
    return unit ? s + " " + unit : s;
  };
  const plots = window.evenerPlots = [];
  let zooming = false;

  function build(chart, host) {
    const log = host.dataset.log === "1";
    const tables = chart.series.map(s => [s.x, s.y]);
    const data = tables.length ? uPlot.join(tables, tables.map(() => [1])) : [[]];
    const tip = node("div", "tip");
    const colour = s => css("--c" + (s.colour % 8));
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } };
    const marks = u => {
      for (const mark of chart.marks || []) {
        const x = u.valToPos(mark.x, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        u.ctx.save();
        u.ctx.strokeStyle = css(mark.kind === "died" || mark.kind === "error" ? "--bad" : mark.kind === "resume" ? "--accent" : "--warn");
        u.ctx.setLineDash([4, 4]);
        u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
        u.ctx.restore();
      }
      if (chart.level) {
        const y = u.valToPos(chart.level, "y", true);
        if (y < u.bbox.top || y > u.bbox.top + u.bbox.height) return;
        u.ctx.save();
        u.ctx.strokeStyle = css("--warn"); u.ctx.setLineDash([8, 4]);
        u.ctx.beginPath(); u.ctx.moveTo(u.bbox.left, y); u.ctx.lineTo(u.bbox.left + u.bbox.width, y); u.ctx.stroke();
        u.ctx.restore();
      }
    };
    const point = u => {
      const i = u.cursor.idx, left = u.cursor.left;
      tip.replaceChildren();
      if (i === null || i === undefined || left < 0) { tip.style.display = "none"; return; }
      tip.append(node("div", "soft", "update " + u.data[0][i].toLocaleString("en")));
      chart.series.forEach((s, n) => {
        const v = u.data[n + 1][i];
        if (v === null || v === undefined) return;
        const row = node("div"), dot = node("span", "dot");
        dot.style.background = colour(s);
        row.append(dot, document.createTextNode((chart.series.length > 1 || s.label !== chart.title ? s.label + "  " : "") + words(v, chart.unit)));
        tip.append(row);
      });
      for (const mark of chart.marks || [])
        if (Math.abs(u.valToPos(mark.x, "x") - left) < 6) tip.append(node("div", "soft", mark.text));
      tip.style.display = "block";
      const room = u.over.clientWidth, wide = tip.offsetWidth, at = u.over.offsetLeft;
      tip.style.left = Math.max(0, at + (left + 14 + wide > room ? left - wide - 14 : left + 14)) + "px";
      tip.style.top = "8px";
    };
    const plot = new uPlot({
      width: host.clientWidth, height: 230, legend: { show: false }, padding: [10, 18, 0, 0],
      cursor: { y: false, sync: { key: "evener", setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : chart.zero ? { range: (u, lo, hi) => [0, Math.max(hi, chart.level ? chart.level : 0) * 1.08 || 1] } : {} },
      axes: [{ ...axis, size: 34 }, { ...axis, ...(chart.unit === "bytes" ? { incrs: [...Array(24).keys()].map(n => 2 ** (20 + n)) } : {}), size: (u, labels) => 18 + 7 * Math.max(3, ...(labels || []).map(one => one.length)), values: (u, ticks) => ticks.map(v => v === null ? "" : words(v, chart.unit === "bytes" ? "bytes" : "")) }],
      series: [{}, ...chart.series.map(s => ({
        label: s.label, stroke: colour(s), width: s.dots ? 0 : 1.6, spanGaps: true, dash: s.dash ? [6, 4] : undefined,
        points: { show: s.dots || s.x.length < 40, size: s.dots ? 8 : 5, fill: colour(s), stroke: colour(s) },
      }))],
      hooks: {
        draw: [marks], setCursor: [point],
        setScale: [(u, key) => {
          if (key !== "x" || zooming || !u.ready) return;
          zooming = true;
          const { min, max } = u.scales.x;
          for (const other of plots) if (other.plot !== u && other.plot.data[0].length) other.plot.setScale("x", { min, max });
          zooming = false;
        }],
        ready: [u => { u.ready = true; host.append(tip); u.over.addEventListener("mouseleave", () => { tip.style.display = "none"; }); }],
      },
    }, data, host);
    return plot;
  }

  function all() {
    for (const { plot, host } of plots) { plot.destroy(); host.replaceChildren(); }
    plots.length = 0;
    for (const host of document.querySelectorAll(".plot")) {
      const chart = spec.charts[+host.dataset.chart];
      plots.push({ chart, host, plot: build(chart, host) });
    }
  }
  all();
  const whole = () => {
    zooming = true;
    for (const { plot } of plots) { const x = plot.data[0]; if (x.length) plot.setScale("x", { min: x[0], max: x[x.length - 1] }); }
    zooming = false;
  };
  document.addEventListener("dblclick", event => { if (event.target.closest(".plot")) whole(); });
  document.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.whole) whole();
    const host = button.dataset.log && document.querySelector(`.plot[data-chart="${button.dataset.log}"]`);
    if (host) {
      const on = host.dataset.log = host.dataset.log === "1" ? "0" : "1";
      button.setAttribute("aria-pressed", on === "1");
      const entry = plots.find(one => one.host === host);
      entry.plot.destroy(); host.replaceChildren();
      entry.plot = build(entry.chart, host);
    }
  });
  new ResizeObserver(() => {
    for (const { plot, host } of plots) if (host.clientWidth && plot.width !== host.clientWidth) plot.setSize({ width: host.clientWidth, height: 230 });
  }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
})();
