// Follows what is being written, unless the reader has scrolled away from the end.

const CLOSE = 40; // pixels from the end that still count as there

const log = document.getElementById("log");
const down = document.getElementById("down");

/** Make a change that may make the page longer, and stay at its end if that is where it is. */
export function follow(change) {
  const there = atEnd();
  change();
  if (there) log.scrollTop = log.scrollHeight;
  down.hidden = atEnd();
}

export function toEnd() {
  log.scrollTop = log.scrollHeight;
}

function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < CLOSE;
}

log.addEventListener("scroll", () => (down.hidden = atEnd()), { passive: true });
down.addEventListener("click", toEnd);
