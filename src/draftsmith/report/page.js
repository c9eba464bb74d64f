const figures = JSON.parse(document.getElementById("charts").textContent);
const ink = getComputedStyle(document.body).color;
figures.forEach((f, i) => {
  f.layout.font.color = ink;
  Plotly.newPlot("chart" + i, f.data, f.layout, {responsive: true, displayModeBar: false});
});

const byId = (id) => document.getElementById(id);
const toggle = (id, name) => {
  const button = byId(id);
  if (!button) return;
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", on);
    document.body.classList.toggle(name, on);
  });
};
toggle("only", "dim");
toggle("cells", "marks");

const samples = [...document.querySelectorAll(".sample[data-share]")];
const filter = () => {
  const set = byId("set").value, kind = byId("kind").value, word = byId("word").value.toLowerCase();
  let shown = 0;
  samples.forEach((s) => {
    const share = Number(s.dataset.share);
    const fits =
      (!set || s.dataset.set === set) &&
      (!kind || (kind === "good" ? share >= 0.5 : share < 0.5)) &&
      (!word || s.textContent.toLowerCase().includes(word));
    s.classList.toggle("hidden", !fits);
    shown += fits;
  });
  byId("shown").textContent = shown + " of " + samples.length + " answers";
};
if (byId("set")) {
  ["set", "kind", "word"].forEach((id) => byId(id).addEventListener("input", filter));
  filter();
}
document.body.dataset.ready = "yes";
