// The page's own script: draws the charts with the library packed into the page, and shades tokens.
// Texts of models and data reach the page through textContent only.
(() => {
  "use strict";
  const nonce = document.currentScript.nonce;
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const shown = (value) => (value === null || value === undefined ? "not finite" : String(value));

  // ---- charts ----

  async function loadLibrary() {
    if (typeof window.Plotly === "object") return true; // of a file beside the page
    const packed = document.getElementById("chart-library");
    if (!packed) {
      document.getElementById("library-missing")?.removeAttribute("hidden");
      return false;
    }
    const bytes = Uint8Array.from(atob(packed.textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    packed.remove();
    return typeof window.Plotly === "object";
  }

  // Where curves coincide, the gaps of the later ones show the earlier ones; six colours are used
  // twice, with other dashes.
  const RUN_DASHES = ["solid", "9px,9px", "5px,11px", "3px,9px", "13px,7px", "2px,5px"];
  const dashOf = (kind, index) => {
    if (kind !== "runs") return index % 2 ? "dash" : "solid";
    return RUN_DASHES[(index + 3 * Math.floor(index / 6)) % 6];
  };

  function traces(plot) {
    const colour = (index) => style(`--c${index % 6}`);
    return plot.series.map((series, index) => {
      const base = { name: series.name, x: series.x, y: series.y, hovertemplate: "%{y:.5g}" };
      if (plot.kind === "stack") {
        return { ...base, type: "bar", marker: { color: colour(index) } };
      }
      const isSparse = series.x.length <= 40 || series.y.includes(null);
      return {
        ...base,
        type: "scatter",
        mode: isSparse ? "lines+markers" : "lines",
        line: { color: colour(index), width: 1.8, dash: dashOf(plot.kind, index) },
        marker: { size: 4, color: colour(index) },
        connectgaps: series.y.every((value) => value !== null),
      };
    });
  }

  function layout(plot) {
    const values = plot.series.flatMap((series) => series.y.filter((value) => value !== null));
    const axis = {
      gridcolor: style("--edge"), zerolinecolor: style("--edge"), linecolor: style("--edge"),
      tickfont: { size: 11 }, exponentformat: "e",
    };
    const steps = plot.series.flatMap((series) => series.x);
    const isShort = Math.max(...steps) - Math.min(...steps) < 8;
    return {
      height: 230, margin: { l: 48, r: 12, t: 8, b: 32 }, showlegend: false, hovermode: "x unified",
      barmode: "stack", bargap: 0.1, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style("--soft") },
      hoverlabel: { bgcolor: style("--page"), bordercolor: style("--edge"), font: { color: style("--ink") } },
      // Only one axis moves its margin: two of them can go on moving each other.
      xaxis: { ...axis, tickangle: 0, tickformat: "d", hoverformat: "d", ...(isShort ? { dtick: 1 } : {}) },
      yaxis: {
        ...axis, automargin: true, rangemode: values.every((value) => value >= 0) ? "nonnegative" : "normal",
        ticksuffix: plot.unit === "s" ? " s" : "",
      },
      shapes: plot.bounds.map((bound) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: bound, y1: bound,
        line: { color: style("--c1"), width: 1, dash: "dot" },
      })),
    };
  }

  async function drawCharts() {
    const holders = [...document.querySelectorAll(".plot")];
    const options = { responsive: true, displaylogo: false, displayModeBar: false };
    for (const holder of holders) {
      const plot = data.charts[Number(holder.dataset.chart)];
      holder.hidden = false;
      await window.Plotly.newPlot(holder, traces(plot), layout(plot), options);
    }
    zoomTogether(holders);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const holder of holders) {
        const plot = data.charts[Number(holder.dataset.chart)];
        window.Plotly.react(holder, traces(plot), layout(plot), options);
      }
    });
  }

  function zoomTogether(holders) {
    let isFollowing = false;
    for (const holder of holders) {
      holder.on("plotly_relayout", async (change) => {
        const from = change["xaxis.range[0]"];
        const isReset = change["xaxis.autorange"] === true;
        if (isFollowing || (from === undefined && !isReset)) return;
        isFollowing = true;
        const range = isReset
          ? { "xaxis.autorange": true, "yaxis.autorange": true }
          : { "xaxis.range": [from, change["xaxis.range[1]"]] };
        const others = holders.filter((other) => other !== holder);
        await Promise.all(others.map((other) => window.Plotly.relayout(other, range)));
        isFollowing = false;
      });
    }
  }

  // ---- tokens ----

  const MEANS = {
    // Value to a number in [-1, 1], given the largest size in view; the sign chooses the colour.
    advantage: (value, largest) => value / largest,
    probability: (value) => value - 1,
    ratio: (value, largest) => Math.log(Math.max(value, 1e-12)) / largest,
    entropy: (value, largest) => -value / largest,
  };
  const SIZES = {
    advantage: Math.abs, probability: () => 1, ratio: (value) => Math.abs(Math.log(Math.max(value, 1e-12))),
    entropy: Math.abs,
  };

  function tokenSpan(sample, position, quantity, largest) {
    const text = sample.tokens[position];
    const isObserved = sample.observed[position];
    const span = element("span", isObserved ? "token observation" : "token", text.replaceAll("\n", "⏎\n"));
    if (isObserved) {
      span.title = `token ${position + 1}: ${JSON.stringify(text)}\nobservation: not sampled, not trained`;
      return span;
    }
    const value = sample[quantity] ? sample[quantity][position] : null;
    if (value !== null) {
      const strength = MEANS[quantity](value, largest);
      const share = Math.round(Math.min(1, Math.abs(strength)) * 70);
      const colour = style(strength < 0 ? "--c1" : "--c0");
      span.style.backgroundColor = `color-mix(in srgb, ${colour} ${share}%, transparent)`;
    }
    const lines = Object.keys(MEANS).filter((name) => sample[name])
      .map((name) => `${name} ${shown(sample[name][position])}`);
    span.title = [`token ${position + 1}: ${JSON.stringify(text)}`, ...lines].join("\n");
    return span;
  }

  function sampleCard(sample, quantity, largest) {
    const card = element("article", "sample");
    const cut = sample.num_tokens > sample.tokens.length ? `, the first ${sample.tokens.length} shown` : "";
    const facts = `reward ${shown(sample.reward)} · ${sample.num_tokens} tokens${cut}`;
    card.append(element("p", "note", facts + (sample.truncated ? " · truncated" : "")));
    card.append(element("pre", "prompt", sample.prompt));
    const response = element("pre", "response");
    for (let position = 0; position < sample.tokens.length; position += 1) {
      response.append(tokenSpan(sample, position, quantity, largest));
    }
    card.append(response);
    return card;
  }

  function showTokens() {
    const place = document.getElementById("token-samples");
    if (!place) return;
    const choices = { step: document.getElementById("token-step"), quantity: document.getElementById("token-quantity") };
    const meaning = document.getElementById("token-meaning");
    const draw = () => {
      const quantity = choices.quantity.value;
      const samples = data.tokens[choices.step.value];
      const sizes = samples.flatMap((sample) => (sample[quantity] || []).filter((value) => value !== null).map(SIZES[quantity]));
      const largest = Math.max(1e-9, ...sizes);
      meaning.textContent = choices.quantity.selectedOptions[0].dataset.meaning;
      place.replaceChildren(...samples.map((sample) => sampleCard(sample, quantity, largest)));
    };
    choices.step.addEventListener("change", draw);
    choices.quantity.addEventListener("change", draw);
    document.getElementById("token-view").hidden = false;
    draw();
  }

  showTokens();
  loadLibrary()
    .then((isLoaded) => (isLoaded ? drawCharts() : undefined))
    .then(() => {
      document.documentElement.dataset.drawn = "true";
    });
})();
