"use strict";
(() => {
  // A mark's title is its tooltip without this script too; here it becomes one that shows at once and keeps its lines.
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const wordsOf = (mark) => {
    const title = mark.querySelector(":scope > title");
    if (title) { mark.dataset.tip = title.textContent; title.remove(); }
    return mark.dataset.tip;
  };
  const place = (event) => {
    const room = 12;
    const left = Math.min(event.clientX + room, innerWidth - tip.offsetWidth - room);
    const below = event.clientY + room;
    const top = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - room : below;
    tip.style.left = `${Math.max(room, left)}px`;
    tip.style.top = `${Math.max(0, top)}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target instanceof Element ? event.target.closest(".mark") : null;
    if (!mark) { hide(); return; }
    tip.textContent = wordsOf(mark);
    tip.hidden = false;
    place(event);
  });
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
