"""Operations on a whole store: health check, repair, compatibility check, import."""
